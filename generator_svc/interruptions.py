"""What running sequences notice of a pause, such as that of a switch of weights under them: how long each waits from
one token to the next. No clock: times come as arguments.
"""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Interruption:
    """One pause, once all that it interrupted have gone on."""

    num_sequences: int
    pause_s: float
    """From the stop to the resume; at a switch that is the load."""
    recompute_s: float
    """From the resume until the last of them had its next token: their caches were computed again, or the like."""
    longest_wait_s: float
    """Of any of them, from its last token before the stop to its next."""

    def __str__(self) -> str:
        return (
            f"{self.num_sequences} running sequences waited {self.longest_wait_s:.3f} s at most: a pause of "
            f"{self.pause_s:.3f} s, and {self.recompute_s:.3f} s until the last went on"
        )


class InterruptionMeter:
    """Told of stops, resumes and steps, in their order."""

    def __init__(self) -> None:
        self._num_running = 0
        self._stopped_s = 0.0
        self._resumed_s: float | None = None
        self._num_gone_on = 0
        self._longest_wait_s = 0.0

    def stopped(self, now_s: float, num_running: int) -> None:
        """Drawing stops under so many sequences."""
        self._num_running, self._stopped_s, self._resumed_s = num_running, now_s, None
        self._num_gone_on, self._longest_wait_s = 0, 0.0

    def resumed(self, now_s: float) -> None:
        self._resumed_s = now_s if self._num_running else None

    def step(self, intervals_s: Collection[float], now_s: float) -> Interruption | None:
        """A step has ended.

        Args:
            intervals_s: seconds since their last token, of all sequences that got one now and had one before.

        Returns:
            What the last pause was to them, if this step was the first in which all had gone on.
        """
        if self._resumed_s is None:
            return None
        since_resume_s = now_s - self._resumed_s
        waits_s = [interval_s for interval_s in intervals_s if interval_s > since_resume_s]
        self._num_gone_on += len(waits_s)
        self._longest_wait_s = max((self._longest_wait_s, *waits_s))
        if self._num_gone_on < self._num_running:
            return None
        interruption = Interruption(
            self._num_gone_on, self._resumed_s - self._stopped_s, since_resume_s, self._longest_wait_s
        )
        self._num_running, self._resumed_s = 0, None
        return interruption
