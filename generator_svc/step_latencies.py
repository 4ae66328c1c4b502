"""How long an engine's steps take, by the number of sequences in them."""

from typing import NamedTuple


class StepSpeed(NamedTuple):
    """Of some steps with about as many sequences, the means. Fields as in `StepLatency`."""

    batch_size: int
    latency_s: float
    num_steps: int
    held_tokens: float


class StepLatencies:
    """Sums durations of steps by batch size, in buckets that double: 1, 2, 3-4, 5-8, ..."""

    def __init__(self) -> None:
        self._buckets: dict[int, tuple[float, float, float, float]] = {}

    def add(self, batch_size: int, duration_s: float, num_steps: float = 1.0, held_tokens: float = 0.0) -> None:
        """Notes steps with the same number of sequences.

        Args:
            duration_s: of all these steps together.
            num_steps: may be broken, for steps that are noted in parts.
            held_tokens: in the cache, mean over these steps.
        """
        bucket = (batch_size - 1).bit_length()
        sequences, total_s, steps, held = self._buckets.get(bucket, (0.0, 0.0, 0.0, 0.0))
        self._buckets[bucket] = (
            sequences + batch_size * num_steps,
            total_s + duration_s,
            steps + num_steps,
            held + held_tokens * num_steps,
        )

    def take(self) -> list[StepSpeed]:
        """Of each bucket, the smallest first; forgets them."""
        taken = [
            StepSpeed(round(sequences / steps), total_s / steps, round(steps), held / steps)
            for _, (sequences, total_s, steps, held) in sorted(self._buckets.items())
            if round(steps) > 0
        ]
        self._buckets = {}
        return taken
