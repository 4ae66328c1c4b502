"""Pure planning functions, shared by scheduler_svc and the command."""
