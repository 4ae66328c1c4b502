"""gRPC servers and channels as every service uses them, and the one mapping between errors and status codes."""
