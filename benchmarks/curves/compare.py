"""Two arms, several seeds each: by how much do their curves differ, and is that more than seeds do? Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

CONFIDENCE = 0.95
"""Of intervals."""
_RARE = 0.01
"""So often are there by chance more points outside of their intervals than are allowed."""


@dataclass(frozen=True)
class Comparison:
    """Of a second arm with a first, point by point (points,) and as a whole.

    Seeds are taken as independent draws from a normal distribution, of one variance in both arms (Student's t).
    """

    difference: Array
    """Of the means, second minus first."""
    spread: Array
    """Standard deviation over the seeds, pooled over both arms."""
    half_width: Array
    """Of the difference's interval."""
    mean_difference: float
    """Over all points."""
    mean_half_width: float
    """Of its interval; from the seeds' means over all points."""

    @property
    def num_points(self) -> int:
        return len(self.difference)

    @property
    def num_within_spread(self) -> int:
        """Where the difference is no larger than the standard deviation over seeds."""
        return int((np.abs(self.difference) <= self.spread + _ROUNDING).sum())

    @property
    def num_outside(self) -> int:
        """Where the difference's interval does not hold 0."""
        return int((np.abs(self.difference) > self.half_width + _ROUNDING).sum())

    @property
    def num_allowed_outside(self) -> int:
        """The fewest that equal arms exceed in one comparison of a hundred, were their points independent."""
        return binomial_quantile(1 - _RARE, self.num_points, 1 - CONFIDENCE)

    @property
    def coincide(self) -> bool:
        """No more differs than seeds do: as a whole, and point by point."""
        return (
            abs(self.mean_difference) <= self.mean_half_width + _ROUNDING
            and self.num_outside <= self.num_allowed_outside
        )


_ROUNDING = 1e-9


def compare(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> Comparison:
    """
    Args:
        first, second: (seeds, points), of at least two seeds each.
    """
    ours, theirs = np.array(first, dtype=np.float64), np.array(second, dtype=np.float64)
    difference, spread, half_width = _differ(ours, theirs)
    mean, _, mean_half_width = _differ(ours.mean(axis=1, keepdims=True), theirs.mean(axis=1, keepdims=True))
    return Comparison(difference, spread, half_width, float(mean[0]), float(mean_half_width[0]))


def _differ(first: Array, second: Array) -> tuple[Array, Array, Array]:
    """Difference of the means, pooled standard deviation and half width of the interval, each (points,)."""
    from scipy.stats import t

    freedom = len(first) + len(second) - 2
    squares = sum(((arm - arm.mean(axis=0)) ** 2).sum(axis=0) for arm in (first, second))
    spread = np.sqrt(squares / freedom)
    quantile = float(t.ppf((1 + CONFIDENCE) / 2, freedom))
    half_width = quantile * spread * math.sqrt(1 / len(first) + 1 / len(second))
    return second.mean(axis=0) - first.mean(axis=0), spread, half_width


def binomial_quantile(probability: float, num_trials: int, chance: float) -> int:
    """The smallest number of successes that is not exceeded with this probability."""
    below = 0.0
    for successes in range(num_trials + 1):
        below += math.comb(num_trials, successes) * chance**successes * (1 - chance) ** (num_trials - successes)
        if below >= probability:
            return successes
    return num_trials
