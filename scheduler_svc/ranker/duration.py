"""How long answers last, as survival analysis has it: a rate of ending for each stretch of the lengths. Pure.

Lengths are cut into stretches, narrow for short ones and in proportion for long ones; within a stretch an answer ends
at a constant rate in the logarithm of its length (the piecewise exponential model). An answer of n tokens says that it
ended there and not before; one that was cut says only that it had not ended. So what answers say of the rates is, for
each stretch, how many ended in it and how far answers went through it: cut answers count as what they are, and pull
nothing towards short lengths.
"""

import math
from collections.abc import Sequence

import numpy as np

from streamrl.planning.forecast import LEVELS, Array

_LEAST_RATIO = 1.15
_MOST_TOKENS = 2**20
_SHORTEST_SHARE, _LONGEST_SHARE = 0.005, 0.9995
"""What a forecast calls its shortest and longest length: a rate knows neither."""


def _edges() -> Array:
    """Logarithms of the lengths between stretches; a whole number of tokens lies in the middle of its stretch."""
    ends = [1]
    while ends[-1] < _MOST_TOKENS:
        ends.append(max(ends[-1] + 1, math.floor(ends[-1] * _LEAST_RATIO)))
    return np.asarray(np.log(np.array([0.5, *(end + 0.5 for end in ends)])))


EDGES: Array = _edges()
WIDTHS: Array = np.diff(EDGES)
NUM_STRETCHES = len(WIDTHS)


def endings_and_exposure(answers: Sequence[tuple[Sequence[int], Sequence[bool]]]) -> tuple[Array, Array]:
    """What answers to prompts say.

    Args:
        answers: for each of n prompts the tokens of its answers, one or more of 1 or more, and whether each was cut
            there: it would have gone on.

    Returns:
        (n, NUM_STRETCHES) answers that ended in each stretch, and (n, NUM_STRETCHES) how far, in the logarithm of the
        length, answers went through it, summed.
    """
    prompts = np.repeat(np.arange(len(answers)), [len(lengths) for lengths, _ in answers])
    lengths = np.concatenate([np.asarray(lengths, dtype=np.float64) for lengths, _ in answers])
    cut = np.concatenate([np.asarray(cut, dtype=bool) for _, cut in answers])
    at = np.clip(np.log(lengths), 0.0, EDGES[-1] - 1e-9)
    # What was cut after n tokens has not ended with the n-th: it went on beyond.
    gone = np.where(cut, np.log(lengths + 0.5), at)
    through = np.clip(gone[:, None] - EDGES[:-1], 0.0, WIDTHS)
    starts = np.flatnonzero(np.diff(prompts, prepend=-1))
    endings = np.zeros((len(answers), NUM_STRETCHES))
    np.add.at(endings, (prompts[~cut], np.searchsorted(EDGES, at[~cut], side="right") - 1), 1.0)
    return endings, np.add.reduceat(through, starts, axis=0)


def usual_rates(endings: Array, exposure: Array) -> Array:
    """The rates of many answers together, where few went rather those of all.

    Args:
        endings, exposure: (NUM_STRETCHES,) sums over answers.
    """
    mean = (endings.sum() + 1.0) / (exposure.sum() + 1.0)
    return np.asarray((endings + mean * 0.1) / (exposure + 0.1))


def length_quantiles(rates: Array) -> Array:
    """The lengths that answers with such rates do not exceed with the probabilities of `forecast.LEVELS`.

    Args:
        rates: (n, NUM_STRETCHES) of ending, above 0.

    Returns:
        (n, number of levels), each row ascends.
    """
    passed = np.concatenate([np.zeros((len(rates), 1)), np.cumsum(rates * WIDTHS, axis=1)], axis=1)
    each = np.arange(len(rates))
    found = []
    for level in LEVELS:
        wanted = -math.log1p(-min(max(level, _SHORTEST_SHARE), _LONGEST_SHARE))
        stretch = np.clip((passed <= wanted).sum(axis=1) - 1, 0, NUM_STRETCHES - 1)
        into = np.clip((wanted - passed[each, stretch]) / rates[each, stretch], 0.0, WIDTHS[stretch])
        found.append(np.exp(EDGES[stretch] + into))
    return np.asarray(np.maximum(np.stack(found, axis=1), 1.0))
