"""trainer_svc: draws prompts, trains on rollouts as they arrive, publishes weight versions."""
