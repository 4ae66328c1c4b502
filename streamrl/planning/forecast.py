"""What is known of lengths of answers before they are there: a distribution each. Pure.

A forecast says, for each answer, at which lengths certain shares of the probability are passed; in between it is taken
to be even. Answers that are under way are longer than what is there: `given` says what that leaves.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LEVELS = (0.0, 0.05, 0.15, 0.3, 0.5, 0.7, 0.82, 0.9, 0.95, 0.98, 0.993, 0.998, 1.0)
"""Shares of the probability at which forecasts made here state lengths: finer towards the long end, which decides when
a batch is over."""

_TABLE_COLUMNS = 256

_OVERDUE = 0.05
"""An answer that is longer than its forecast held possible goes on for this share of its length, for all one knows."""


@dataclass(frozen=True)
class Remaining:
    """What is still to come of answers, one entry each."""

    mean: Array
    """Expected tokens."""
    held: Array
    """Expected sum, over the tokens to come, of the answer's tokens that the cache holds by then."""
    risk: Array
    """Tokens that it exceeds with the probability asked for."""


class LengthForecast:
    """Distributions of the lengths of n answers."""

    def __init__(self, lengths: Array, levels: Sequence[float] | Array = LEVELS) -> None:
        """
        Args:
            lengths: (n, number of levels); row i ascends; its entry j is what answer i does not exceed with a
                probability of levels[j].
            levels: ascending, from 0 to 1.

        Raises:
            ValueError: they make no sense.
        """
        self.lengths = np.asarray(lengths, dtype=np.float64)
        self.levels = np.asarray(levels, dtype=np.float64)
        if self.lengths.ndim != 2 or self.lengths.shape[1] != len(self.levels):
            raise ValueError(
                f"expected a length at {len(self.levels)} levels for each answer, got {self.lengths.shape}"
            )
        if self.levels[0] != 0 or self.levels[-1] != 1 or (np.diff(self.levels) <= 0).any():
            raise ValueError(f"expected levels that ascend from 0 to 1, got {list(levels)}")
        if not np.isfinite(self.lengths).all() or (self.lengths < 0).any() or (np.diff(self.lengths) < 0).any():
            raise ValueError("expected the lengths of an answer to be 0 or more and to ascend")
        # Between two levels the lengths are even: each piece of a distribution is its middle, for means.
        self._middles = (self.lengths[:, 1:] + self.lengths[:, :-1]) / 2
        self._weights = np.diff(self.levels)

    @classmethod
    def exact(cls, lengths: Sequence[float] | Array) -> "LengthForecast":
        """Lengths that are known."""
        column = np.asarray(lengths, dtype=np.float64)[:, None]
        return cls(np.repeat(column, 2, axis=1), (0.0, 1.0))

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def mean(self) -> Array:
        """(n,) expected tokens."""
        return self._middles @ self._weights

    def survival(self, tokens: Array) -> Array:
        """The probability that answers are longer than so many tokens, exactly.

        Args:
            tokens: (n, k), or something that becomes that.

        Returns:
            (n, k)
        """
        tokens = np.broadcast_to(tokens, (len(self), np.shape(tokens)[-1]))
        passed = np.zeros(tokens.shape)
        for piece, weight in enumerate(self._weights):
            low, high = self.lengths[:, piece, None], self.lengths[:, piece + 1, None]
            width = high - low
            share = np.divide(tokens - low, width, out=(tokens >= low).astype(np.float64), where=width > 0)
            passed += weight * np.clip(share, 0.0, 1.0)
        return np.maximum(1.0 - passed, 0.0)

    @cached_property
    def column_tokens(self) -> float:
        """Tokens between two columns of `table`."""
        return float(self.lengths.max(initial=1.0)) * 1.01 / (_TABLE_COLUMNS - 1)

    @cached_property
    def table(self) -> NDArray[np.float32]:
        """(n, columns) `survival` at multiples of `column_tokens`, the last beyond everything."""
        return self.survival(np.arange(_TABLE_COLUMNS, dtype=np.float64) * self.column_tokens).astype(np.float32)

    def chance(self, answers: NDArray[np.int64], tokens: Array) -> Array:
        """The same from the table: nearly as good, and fast for many.

        Args:
            answers: indices.
            tokens: of the same shape.
        """
        column = np.clip(tokens / self.column_tokens, 0.0, _TABLE_COLUMNS - 1.001)
        below = column.astype(np.int64)
        share = column - below
        return np.asarray(self.table[answers, below] * (1 - share) + self.table[answers, below + 1] * share)

    def remaining(
        self,
        tokens_there: Array,
        prompt_tokens: Array | float = 0.0,
        *,
        exceeded_with: float = 0.1,
        rows: NDArray[np.int64] | None = None,
    ) -> Remaining:
        """What is to come of answers that have so many tokens and have not ended.

        Args:
            tokens_there: an entry for each answer.
            prompt_tokens: likewise, for `held`.
            exceeded_with: the probability, for `risk`.
            rows: the answers that are asked for; None: all.
        """
        lengths = self.lengths if rows is None else self.lengths[rows]
        there = np.asarray(tokens_there, dtype=np.float64)[:, None]
        low, high = np.maximum(lengths[:, :-1], there), lengths[:, 1:]
        width = lengths[:, 1:] - lengths[:, :-1]
        kept = np.divide(high - low, width, out=(high > there).astype(np.float64), where=width > 0)
        weights = self._weights * np.clip(kept, 0.0, 1.0)
        alive = weights.sum(axis=1)
        overdue = alive <= 1e-12
        weights /= np.where(overdue, 1.0, alive)[:, None]
        middles = np.maximum((low + high) / 2 - there, 0.0)
        mean = (weights * middles).sum(axis=1)
        squares = (weights * (middles**2 + np.maximum(high - low, 0.0) ** 2 / 12)).sum(axis=1)
        later = np.cumsum(weights[:, ::-1], axis=1)[:, ::-1]
        # The piece in which the probability of being longer falls below the one asked for, and how far into it.
        piece = np.clip((later >= exceeded_with).sum(axis=1) - 1, 0, weights.shape[1] - 1)
        each = np.arange(len(lengths))
        within = (later[each, piece] - exceeded_with) / np.maximum(weights[each, piece], 1e-12)
        risk = low[each, piece] + np.clip(within, 0.0, 1.0) * np.maximum(high[each, piece] - low[each, piece], 0.0)
        more = np.maximum(1.0, _OVERDUE * there[:, 0])
        mean = np.where(overdue, more, mean)
        squares = np.where(overdue, more**2, squares)
        risk = np.where(overdue, 2 * more, np.maximum(risk - there[:, 0], 0.0))
        return Remaining(mean, mean * (there[:, 0] + prompt_tokens) + squares / 2, risk)


def mean_length(lengths: Sequence[float]) -> float:
    """The mean of one answer's distribution, in tokens.

    Args:
        lengths: at `LEVELS`.
    """
    pieces = zip(itertools.pairwise(lengths), itertools.pairwise(LEVELS), strict=True)
    return sum((low + high) / 2 * (to - since) for (low, high), (since, to) in pieces)
