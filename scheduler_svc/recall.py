"""How well long answers are foretold: the share of the longest that forecasts had among the longest. Pure."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_MOST_PROMPTS = 512
LEAST_PROMPTS = 20
"""Of fewer prompts even the longest twentieth is nothing."""


def recall_of_longest(forecasts: Sequence[float], lengths: Sequence[float], share: float) -> float:
    """Of the longest `share` of answers, how many are among as many of the longest forecasts (paper, section 5).

    Args:
        forecasts, lengths: of the same prompts, one or more.
        share: above 0, to 1; at least one answer counts.

    Returns:
        0 to 1. Equal values count by their order, so that forecasts that say nothing find nothing by luck of ties.
    """
    count = max(1, math.floor(share * len(lengths) + 0.5))
    return len(_longest(forecasts, count) & _longest(lengths, count)) / count


def _longest(values: Sequence[float], count: int) -> set[int]:
    return set(sorted(range(len(values)), key=lambda index: -values[index])[:count])


@dataclass(frozen=True, slots=True)
class RecallFigures:
    """Recall of the longest 20, 10 and 5 %, 0 to 1."""

    num_prompts: int
    of_fifth: float
    of_tenth: float
    of_twentieth: float


class ForecastCheck:
    """The last prompts that were forecast before anything was learned from their answers, and what came."""

    def __init__(self, most: int = _MOST_PROMPTS) -> None:
        self._pairs: deque[tuple[float, float]] = deque(maxlen=most)

    def add(self, forecast: float, length: float) -> None:
        """Expected and mean length of a prompt's answers."""
        self._pairs.append((forecast, length))

    def figures(self) -> RecallFigures | None:
        """None: too few have come."""
        if len(self._pairs) < LEAST_PROMPTS:
            return None
        forecasts, lengths = zip(*self._pairs, strict=True)
        of_fifth, of_tenth, of_twentieth = (
            recall_of_longest(forecasts, lengths, share) for share in (0.20, 0.10, 0.05)
        )
        return RecallFigures(len(self._pairs), of_fifth, of_tenth, of_twentieth)
