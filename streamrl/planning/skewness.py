"""Skewness-aware dispatching: the paper's Algorithm 2. Pure.

The longest answers get instances of their own, where they run in small batches, which are faster a token; how many
instances is searched for with a model of latency (Eq 2) and two lengths, one for the long tail and one for the rest.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from streamrl.planning.profile import TokenLatency

Objective = Literal["sum", "max"]
"""Of the two sides' latencies, what is minimised: the paper prints the sum; a batch lasts as long as the maximum."""

_TIE = 1e-9
"""Objectives that differ by less, relative, are equal: the fewest long-tail instances are taken."""


@dataclass(frozen=True, slots=True)
class SkewnessPlan:
    """Who draws what."""

    num_long_tail: int
    """The first so many instances draw the long tail; 0: there is one instance, which draws all."""
    instances: list[list[int]]
    """For each instance the indices of its answers, the longest first."""
    estimated_s: list[float]
    """For each instance, Eq 2."""


def instance_latency_s(num_answers: int, mean_tokens: float, max_batch: int, token_latency: TokenLatency) -> float:
    """How long an instance is busy: PTL(BS) * L_avg * ceil(M / BS), with BS = min(M, max_batch) (Eq 2); 0 for nothing.

    Args:
        num_answers: M.
        mean_tokens: L_avg.
        max_batch: how many sequences the instance runs at once.
    """
    if num_answers == 0:
        return 0.0
    batch_size = min(num_answers, max_batch)
    return token_latency(batch_size) * mean_tokens * math.ceil(num_answers / batch_size)


def plan_by_skewness(
    lengths: Sequence[float],
    num_instances: int,
    *,
    token_latency: TokenLatency,
    max_batch: int,
    length_p50: float,
    length_p90: float,
    alpha: float = 0.2,
    objective: Objective = "sum",
) -> SkewnessPlan:
    """Divides answers among instances as Algorithm 2 does.

    Args:
        lengths: estimated tokens of each answer.
        num_instances: 1 or more.
        max_batch: sequences that an instance runs at once, 1 or more.
        length_p50: of recent answers: what an answer outside the long tail is taken to need.
        length_p90: the same for the long tail.
        alpha: share of the answers that is the long tail: the first floor(alpha n) by length, equal ones by index.
    """
    by_length = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    num_long = math.floor(alpha * len(lengths))
    long_tail, regular = by_length[:num_long], by_length[num_long:]
    if num_instances == 1:
        estimate = instance_latency_s(len(by_length), length_p50, max_batch, token_latency)
        return SkewnessPlan(0, [by_length], [estimate])

    def latency_s(num_answers: int, mean_tokens: float, instances: int) -> float:
        return instance_latency_s(math.ceil(num_answers / instances), mean_tokens, max_batch, token_latency)

    combine: Callable[[float, float], float] = max if objective == "max" else float.__add__
    objectives = [
        combine(
            latency_s(len(long_tail), length_p90, count), latency_s(len(regular), length_p50, num_instances - count)
        )
        for count in range(1, num_instances)
    ]
    least = min(objectives)
    num_long_tail = 1 + next(index for index, value in enumerate(objectives) if value <= least * (1 + _TIE))
    instances = [long_tail[turn::num_long_tail] for turn in range(num_long_tail)]
    num_regular = num_instances - num_long_tail
    instances += [regular[turn::num_regular] for turn in range(num_regular)]
    estimated_s = [
        instance_latency_s(len(share), length_p90 if index < num_long_tail else length_p50, max_batch, token_latency)
        for index, share in enumerate(instances)
    ]
    return SkewnessPlan(num_long_tail, instances, estimated_s)
