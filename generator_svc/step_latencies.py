"""How long an engine's steps take, by the number of sequences in them."""


class StepLatencies:
    """Sums durations of steps by batch size, in buckets that double: 1, 2, 4, 8, ..."""

    def __init__(self) -> None:
        self._buckets: dict[int, tuple[int, float, int]] = {}

    def add(self, batch_size: int, duration_s: float) -> None:
        """Notes one step."""
        bucket = (batch_size - 1).bit_length()
        sequences, total_s, steps = self._buckets.get(bucket, (0, 0.0, 0))
        self._buckets[bucket] = (sequences + batch_size, total_s + duration_s, steps + 1)

    def take(self) -> list[tuple[int, float, int]]:
        """(mean batch size of the bucket, mean seconds a step, number of steps), smallest first; forgets them."""
        taken = [
            (round(sequences / steps), total_s / steps, steps)
            for _, (sequences, total_s, steps) in sorted(self._buckets.items())
        ]
        self._buckets = {}
        return taken
