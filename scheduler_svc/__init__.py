"""scheduler_svc: admits batches by staleness and decides which instance generates which sample."""
