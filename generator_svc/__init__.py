"""generator_svc: one inference engine that turns assignments into rollouts."""
