"""What the services share: contracts, settings, errors, logs, Kafka, gRPC. No torch and no vLLM in here."""

__version__ = "0.1.0"
