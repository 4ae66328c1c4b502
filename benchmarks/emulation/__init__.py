"""Devices that this machine does not have: the real services, broker and gRPC, in which generation and training take
the time that they would take there, on a clock that is scaled."""
