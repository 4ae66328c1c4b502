"""A thin layer on confluent-kafka: every delivery and every message's error is checked here, and only here."""
