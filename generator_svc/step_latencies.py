"""How long an engine's steps take, by the number of sequences in them."""


class StepLatencies:
    """Sums durations of steps by batch size, in buckets that double: 1, 2, 3-4, 5-8, ..."""

    def __init__(self) -> None:
        self._buckets: dict[int, tuple[float, float, float]] = {}

    def add(self, batch_size: int, duration_s: float, num_steps: float = 1.0) -> None:
        """Notes steps with the same number of sequences.

        Args:
            duration_s: of all these steps together.
            num_steps: may be broken, for steps that are noted in parts.
        """
        bucket = (batch_size - 1).bit_length()
        sequences, total_s, steps = self._buckets.get(bucket, (0.0, 0.0, 0.0))
        self._buckets[bucket] = (sequences + batch_size * num_steps, total_s + duration_s, steps + num_steps)

    def take(self) -> list[tuple[int, float, int]]:
        """(mean batch size of the bucket, mean seconds a step, number of steps), smallest first; forgets them."""
        taken = [
            (round(sequences / steps), total_s / steps, round(steps))
            for _, (sequences, total_s, steps) in sorted(self._buckets.items())
            if round(steps) > 0
        ]
        self._buckets = {}
        return taken
