"""The paper's recorded lengths and latencies, and estimates of lengths that are as wrong as rankers are. Pure.

Numbers are read off the figures of arXiv 2504.15930: Fig 6 (token latency of a 7B model on an H800) and Fig 7 (lengths
with a maximum of 20K tokens).
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from streamrl.planning.forecast import LEVELS, Array, LengthForecast
from streamrl.planning.profile import TokenLatency

TOKEN_LATENCY_MS = {
    1: 8.35, 2: 8.75, 4: 9.0, 8: 9.05, 16: 9.45, 32: 10.25, 64: 11.65, 128: 15.25, 256: 21.2, 512: 36.9,
}  # fmt: skip
"""By number of running sequences."""
TOKEN_LATENCY = TokenLatency({size: latency_ms / 1000 for size, latency_ms in TOKEN_LATENCY_MS.items()})
HELD_TOKEN_S = 20e-9
"""57,344 bytes of cache a token (28 layers, 4 heads of 128 for keys and for values, BF16) at 85 % of 3.35 TB/s."""
PREFILL_TOKEN_S = 31e-6
"""15.2 GFLOP a token at half of 989.5 TFLOPS."""
LENGTH_P50, LENGTH_P90 = 3241.0, 13063.0

_DENSITY = np.array(
    [
        19.7, 26.6, 19.1, 18.3, 12.2, 9.7, 8.4, 4.8, 5.3, 3.4, 2.5, 3.6, 2.5, 0.9, 1.1,
        0.7, 1.1, 0.5, 2.1, 1.3, 1.3, 3.1, 1.0, 1.1, 1.2, 1.7, 1.3, 1.7, 1.0, 1.4,
    ]
)  # fmt: skip
_EDGES = np.linspace(847, 19950, len(_DENSITY) + 1)
_SHARES = _DENSITY / _DENSITY.sum()
_LEVELS = np.concatenate([[0.0], np.cumsum(_SHARES)])
MEAN_LENGTH = float((_SHARES * (_EDGES[:-1] + _EDGES[1:])).sum() / 2)
LONGEST = 20_000
"""Of this set of lengths; those of the paper's other two are ours: the same, scaled."""

LOG_ERROR = 0.273
"""Of estimates that are wrong by a log-normal factor: with this they find 0.87 of the longest fifth."""
OVERLOOKED = 0.13
"""Share of the longest fifth that is estimated at the median."""

Estimate = Callable[[NDArray[np.int64], np.random.Generator], tuple[Array, LengthForecast]]
"""From lengths to point estimates, and to what one who knows how such estimates err makes of them."""


def draw_lengths(count: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """Lengths of answers, in tokens."""
    bins = generator.choice(len(_SHARES), size=count, p=_SHARES)
    return np.rint(_EDGES[bins] + generator.random(count) * np.diff(_EDGES)[bins]).astype(np.int64)


def scaled_lengths(count: int, longest: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """The same lengths, with a maximum that fits the machine."""
    scaled: NDArray[np.int64] = np.rint(draw_lengths(count, generator) * (longest / LONGEST)).astype(np.int64)
    return scaled.clip(1, longest)


def length_at(level: float) -> float:
    """The length, in tokens, that a share `level` of all answers does not exceed."""
    return float(np.interp(level, _LEVELS, _EDGES))


def true_lengths(lengths: NDArray[np.int64], _generator: np.random.Generator) -> tuple[Array, LengthForecast]:
    """An oracle."""
    return lengths.astype(np.float64), LengthForecast.exact(lengths.astype(np.float64))


def log_normal_error(lengths: NDArray[np.int64], generator: np.random.Generator) -> tuple[Array, LengthForecast]:
    """Estimates of 0.87 recall; the forecast is what Bayes makes of one and of the lengths that are usual."""
    estimates = lengths * np.exp(LOG_ERROR * generator.normal(size=len(lengths)))
    lengths_grid = np.linspace(_EDGES[0], _EDGES[-1], 401)[:-1] + (_EDGES[-1] - _EDGES[0]) / 800
    prior = np.log(_SHARES[np.searchsorted(_EDGES, lengths_grid) - 1])
    distance = np.log(estimates)[:, None] - np.log(lengths_grid)[None, :]
    weights = prior[None, :] - distance**2 / (2 * LOG_ERROR**2)
    weights = np.exp(weights - weights.max(axis=1, keepdims=True))
    passed = np.cumsum(weights, axis=1)
    passed /= passed[:, -1:]
    levels = np.clip(LEVELS, 1e-4, 1 - 1e-5)
    found = np.stack([lengths_grid[np.minimum((passed < level).sum(axis=1), 399)] for level in levels], axis=1)
    return estimates, LengthForecast(found)


def overlooked_tail(lengths: NDArray[np.int64], generator: np.random.Generator) -> tuple[Array, LengthForecast]:
    """Estimates that are right, but for 13 % of the longest fifth, which are estimated at the median. The forecast is
    that of a ranker which knows, for each tenth of its estimates, how often they are of the longest fifth after all."""
    order = np.argsort(-lengths, kind="stable")
    longest = order[: len(lengths) // 5]
    overlooked = generator.permutation(longest)[: round(OVERLOOKED * len(longest))]
    estimates = lengths.astype(np.float64)
    estimates[overlooked] = np.median(lengths)
    tenths = np.searchsorted(np.quantile(estimates, np.arange(1, 10) / 10), estimates, side="right")
    doubtful = tenths == tenths[overlooked[0]]
    chance = len(overlooked) / int(doubtful.sum())
    tail = np.quantile(lengths[longest], [0.0, 0.25, 0.5, 0.75, 1.0])
    rows = np.where(doubtful[:, None], tail[None, :], estimates[:, None])
    forecast = np.concatenate([estimates[:, None], estimates[:, None], rows], axis=1)
    levels = [0.0, 1 - chance, *(1 - chance * (1 - part) for part in (0.001, 0.25, 0.5, 0.75)), 1.0]
    return estimates, LengthForecast(forecast, levels)
