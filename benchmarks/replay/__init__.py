"""Real vLLM instances whose answers are as long as the benchmark says: policies on the same work, on a real engine."""
