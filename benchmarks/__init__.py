"""Measurements, each a ratio against a peer or a limit in one run: `python -m benchmarks NAME --json`."""
