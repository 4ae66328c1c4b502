"""How much of its work an instance does in a time, and what is late then, though lengths are uncertain. Pure.

An instance makes as many steps as its longest answer has tokens, and a step takes longer the more sequences take part.
So what counts is the work that goes along: in a time T an instance with W expected tokens makes n steps, where

    n * PTL(W / n) + (cost of a held token) * (tokens held, summed over the steps) = T,

and W / n is its mean batch. Answers of more than n tokens are late. Their expected number is what plans weigh: with L
of them over a fleet, everything is done by T with a probability of about exp(-L).
"""

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamrl.planning.forecast import Array, LengthForecast, Remaining
from streamrl.planning.profile import InstanceProfile, TokenLatency

Rows = NDArray[np.int64]

_MOST_ROWS = 2048
_QUEUE_PARTS = 8


@dataclass(frozen=True)
class Work:
    """Answers to plan: n prompts, of which each has some answers with one forecast."""

    forecast: LengthForecast
    num_samples: NDArray[np.int64]
    """(n,) answers of each prompt."""
    prompt_tokens: Array
    """(n,)"""


def steps_within(profile: InstanceProfile, time_s: Array | float, tokens: Array | float, held: Array | float) -> Array:
    """How many steps an instance makes in a time while it works on so many tokens: n above; 0 when there is no time.

    Args:
        held: tokens in the cache, summed over the steps.
    """
    left_s = np.maximum(np.asarray(time_s - profile.held_token_s * np.asarray(held)), 0.0)
    alone_s, full_s, token_s, shares = _pace(profile.token_latency, profile.max_running)
    tokens = np.asarray(tokens)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        each_s = np.where(tokens > 0, left_s / tokens, np.inf)
    between = tokens * np.interp(each_s, token_s, shares)
    steps = np.where(each_s >= token_s[-1], left_s / alone_s, np.where(each_s <= token_s[0], left_s / full_s, between))
    return np.asarray(steps, dtype=np.float64)


@functools.lru_cache(maxsize=4096)
def _pace(latency: TokenLatency, max_running: int) -> tuple[float, float, Array, Array]:
    """What solves the equation above. Divided by W it says how long a token takes when a batch makes them, PTL(b) / b,
    and that is linear in 1 / b = n / W wherever PTL is linear in b.

    Returns:
        Seconds of a step alone and of a full one; (k,) seconds of a token, ascending, of batches from full to alone;
        (k,) 1 / b of each.
    """
    measured = (size for size in latency.sizes if size < max_running)
    sizes = np.array(sorted({1, max_running, *measured}, reverse=True), dtype=np.float64)
    token_s = latency.of_means(sizes) / sizes
    # Where larger batches are slower as a whole, smaller ones are taken to be no faster.
    return latency(1), latency(max_running), np.maximum.accumulate(token_s), 1 / sizes


class Outlook:
    """Prompts in one order, of which stretches are given to instances: sums over a stretch are differences.

    Stretches go from row to row; a row is a prompt, or of very many some that follow each other. Arguments may be
    arrays of one shape, or what becomes one.
    """

    def __init__(self, work: Work, remaining: Remaining, order: NDArray[np.int64]) -> None:
        """
        Args:
            remaining: of each prompt's answers, of which nothing is there.
            order: the indices of the prompts, in the order in which an instance starts them.
        """
        forecast, counts = work.forecast, work.num_samples[order].astype(np.float64)
        self.stride = -(-len(order) // _MOST_ROWS)
        """Prompts in a row."""
        marks = np.append(np.arange(0, len(order), self.stride), len(order))
        self.num_rows = len(marks) - 1
        self._samples = _prefix_sums(counts)[marks]
        self._tokens = _prefix_sums(counts * remaining.mean[order])[marks]
        self._held = _prefix_sums(counts * remaining.held[order])[marks]
        # The middle prompt of a row stands for all.
        middles = LengthForecast(forecast.lengths[order[(marks[:-1] + marks[1:]) // 2]], forecast.levels)
        longer = np.cumsum(middles.table * np.diff(self._samples)[:, None], axis=0)
        self._longer = np.concatenate([np.zeros((1, longer.shape[1])), longer])
        self._column_tokens = middles.column_tokens

    @property
    def total_tokens(self) -> float:
        """Expected of all."""
        return float(self._tokens[-1])

    def num_samples(self, start: Rows | int, end: Rows | int) -> Array:
        return np.asarray(self._samples[end] - self._samples[start])

    def places(self, profile: InstanceProfile, start: Rows | int, end: Rows | int) -> Array:
        """How many answers of a stretch an instance runs at once: as it is set, or as many as its cache holds of them
        on average."""
        tokens, held = self._tokens[end] - self._tokens[start], self._held[end] - self._held[start]
        in_cache = profile.kv_cache_tokens * (tokens / np.maximum(held, 1e-9))
        return np.asarray(np.clip(np.where(held > 0, in_cache, np.inf), 1.0, profile.max_running))

    def late(
        self,
        profile: InstanceProfile,
        start: Rows | int,
        end: Rows | int,
        time_s: Array | float,
        *,
        share: Array | float = 1.0,
        before: Array | float = 0.0,
        queue: bool = True,
    ) -> Array:
        """How many answers of a stretch are expected not to have ended by a time on one instance.

        Args:
            share: of the stretch, which is dealt in turn, what this instance gets.
            before: expected tokens that it has to work on besides.
            queue: whether to count those that cannot start at once.

        Returns:
            Infinity where it cannot even do the work.
        """
        start, end, share = np.asarray(start), np.asarray(end), np.asarray(share)
        tokens = (self._tokens[end] - self._tokens[start]) * share + before
        steps = steps_within(profile, time_s, tokens, (self._held[end] - self._held[start]) * share)
        batch_limit = self.places(profile, start, end)
        places = batch_limit / share
        # The first ones start at once.
        placed = np.minimum(np.searchsorted(self._samples, self._samples[start] + places - 0.5), end)
        late = self._longer_than(start, placed, steps)
        if queue and (placed < end).any():
            late = late + self._late_of_queue(start, placed, end, steps, places)
        return np.where(steps * batch_limit < tokens, np.inf, late * share)

    def _late_of_queue(self, start: Rows, placed: Rows, end: Rows, steps: Array, places: Array) -> Array:
        """Those beyond the first batch start when the work ahead is done: all of what started a full batch earlier,
        half of that batch."""
        late = np.zeros(np.broadcast_shapes(placed.shape, end.shape, steps.shape))
        for part in range(_QUEUE_PARTS):
            first = placed + (end - placed) * part // _QUEUE_PARTS
            last = placed + (end - placed) * (part + 1) // _QUEUE_PARTS
            middle = (first + last) // 2
            earlier = np.maximum(np.searchsorted(self._samples, self._samples[middle] - places), start)
            ahead = (self._tokens[middle] + self._tokens[earlier]) / 2 - self._tokens[start]
            late += self._longer_than(first, last, steps - ahead / places)
        return late

    def _longer_than(self, start: Rows, end: Rows, tokens: Array) -> Array:
        """How many of a stretch are expected to have more tokens; all, where tokens are negative."""
        column = np.clip(tokens / self._column_tokens, 0.0, self._longer.shape[1] - 1.001)
        below = column.astype(np.int64)
        share = column - below
        longer = self._longer
        found: Array = (longer[end, below] - longer[start, below]) * (1 - share)
        found += (longer[end, below + 1] - longer[start, below + 1]) * share
        return np.where(tokens < 0, self.num_samples(start, end), found)


def _prefix_sums(values: Array) -> Array:
    return np.concatenate([[0.0], np.cumsum(values)])
