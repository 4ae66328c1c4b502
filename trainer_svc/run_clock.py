"""Which time counts for throughput and idle shares, and how much of it the trainer waited.

It counts from the first training prompt to the last step; blocking evaluations and pauses are left out. What happens
after the last step so far belongs to the next iteration, and to nothing if there is none.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Times:
    wall_s: float
    wait_s: float


class RunClock:
    """Counts while it is told to."""

    def __init__(self, wall_s: float = 0.0, wait_s: float = 0.0, now: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            wall_s, wait_s: of the iterations before a checkpoint that this run continues.
        """
        self._now = now
        self._wall_s = wall_s
        self._wait_s = wait_s
        self._since_s: float | None = None
        self._last_step = self._step_before = _Times(wall_s, wait_s)

    @property
    def counting(self) -> bool:
        return self._since_s is not None

    def count(self, counting: bool) -> None:
        """Whether the time from now on counts."""
        now_s = self._now()
        if self._since_s is not None:
            self._wall_s += now_s - self._since_s
        self._since_s = now_s if counting else None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """In this block the trainer waits for others."""
        started_s = self._now()
        try:
            yield
        finally:
            if self.counting:
                self._wait_s += self._now() - started_s

    def end_iteration(self) -> None:
        """A step has ended, and with it its iteration."""
        self.count(self.counting)
        self._step_before, self._last_step = self._last_step, _Times(self._wall_s, self._wait_s)

    @property
    def wall_s(self) -> float:
        """Of all iterations."""
        return self._last_step.wall_s

    @property
    def wait_s(self) -> float:
        """How much of it the trainer waited."""
        return self._last_step.wait_s

    @property
    def idle_share(self) -> float:
        """Of all iterations, 0 to 1."""
        return min(1.0, self.wait_s / self.wall_s) if self.wall_s > 0 else 0.0

    def iteration_figures(self, num_samples: int, num_tokens: int) -> dict[str, float]:
        """Of the last iteration, in which so many samples were trained and so many tokens came."""
        iteration_s = max(1e-9, self._last_step.wall_s - self._step_before.wall_s)
        return {
            "time/iteration_s": iteration_s,
            "time/wait_s": self._last_step.wait_s - self._step_before.wait_s,
            "throughput/samples_per_s": num_samples / iteration_s,
            "throughput/tokens_per_s": num_tokens / iteration_s,
            "idle/trainer": self.idle_share,
        }
