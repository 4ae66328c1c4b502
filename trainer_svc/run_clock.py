"""Which time counts for throughput and idle shares, and how much of it the trainer waited."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class RunClock:
    """Runs from the first training prompt to the last step; blocking evaluations and pauses are left out."""

    def __init__(self, wall_s: float = 0.0, wait_s: float = 0.0, now: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            wall_s, wait_s: of the iterations before a checkpoint that this run continues.
        """
        self._now = now
        self._wall_s = wall_s
        self._wait_s = wait_s
        self._since_s: float | None = None
        self._stopped_wall_s = wall_s
        self._stopped_wait_s = wait_s

    def start(self) -> None:
        """The first training prompt is about to be written."""
        self._since_s = self._now()

    def split(self) -> None:
        """A step has ended: the time until here is that of trained iterations."""
        self._stopped_wall_s = self.wall_s
        self._stopped_wait_s = self._wait_s

    @property
    def running(self) -> bool:
        return self._since_s is not None

    @property
    def wall_s(self) -> float:
        """Time that counts, until now."""
        return self._wall_s + (self._now() - self._since_s if self._since_s is not None else 0.0)

    @property
    def trained_wall_s(self) -> float:
        """Time that counts, until the last step."""
        return self._stopped_wall_s

    @property
    def trained_wait_s(self) -> float:
        """How much of it the trainer waited."""
        return self._stopped_wait_s

    @property
    def idle_share(self) -> float:
        """Share of the time until the last step in which the trainer waited."""
        return self._stopped_wait_s / self._stopped_wall_s if self._stopped_wall_s > 0 else 0.0

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """The time of this block does not count."""
        was_running = self.running
        self._wall_s, self._since_s = self.wall_s, None
        try:
            yield
        finally:
            if was_running:
                self._since_s = self._now()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """In this block the trainer waits for others."""
        started_s = self._now()
        try:
            yield
        finally:
            if self.running:
                self._wait_s += self._now() - started_s

    @property
    def wait_s(self) -> float:
        """Time that the trainer waited, until now."""
        return self._wait_s
