"""What an instance does at any time, as spans, and for how long it was busy."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from streamrl.spans import SpanLog


@dataclass(frozen=True, slots=True)
class Activity:
    """One stretch of an instance's time. Fields as in `Span`."""

    name: str
    """generate, switch or wait."""
    detail: str = ""
    batch: int = 0
    weight_version: int = 0


class ActivityLog:
    """One activity follows the other without gaps; each is written when the next begins."""

    def __init__(self, spans: SpanLog, clock: Callable[[], float] = time.time) -> None:
        self._spans = spans
        self._clock = clock
        self._current: Activity | None = None
        self._since_s = 0.0
        self._busy_s = 0.0

    def become(self, activity: Activity | None) -> None:
        """None: the instance ends."""
        if activity == self._current:
            return
        now = self._clock()
        if (ended := self._current) is not None:
            self._busy_s += (now - self._since_s) * (ended.name == "generate")
            self._spans.write(
                ended.name,
                self._since_s,
                now,
                detail=ended.detail,
                batch=ended.batch,
                weight_version=ended.weight_version,
            )
        self._current, self._since_s = activity, now

    def switched(self, switch_s: float, weight_version: int) -> None:
        """A switch in the middle of sequences has just ended."""
        now = self._clock()
        self._spans.write("switch", now - switch_s, now, weight_version=weight_version)

    @property
    def busy_s(self) -> float:
        """Seconds with at least one running sequence, since the process began."""
        running = self._current is not None and self._current.name == "generate"
        return self._busy_s + (self._clock() - self._since_s if running else 0.0)
