"""Lengths of answers that a real model produced, for benchmarks: prompts are made anew, lengths are kept."""
