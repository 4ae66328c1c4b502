"""From the rewards of a group to the advantages of its samples, and which samples are trained: pure functions.

Losses are in trainer_svc/losses.py; rewards themselves in trainer_svc/rewards.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence

EQUAL_REWARDS_TOLERANCE = 1e-6
"""Rewards whose range is at most this are equal: their differences are rounding, not signal."""

STD_EPSILON = 1e-4
"""Added to the standard deviation, so that a tiny one does not make huge advantages."""


def rewards_are_equal(rewards: Sequence[float]) -> bool:
    """Whether a group says nothing about which of its answers is better."""
    return max(rewards) - min(rewards) <= EQUAL_REWARDS_TOLERANCE


def centred(rewards: Sequence[float]) -> list[float]:
    """reward - mean, in a group (Dr. GRPO, Liu et al. 2025, section 3.1).

    A group of equal rewards, tested within a tolerance before anything is divided, gets exactly 0 everywhere, here and
    in what follows: its samples have no gradient, so forward and backward passes may skip them. They stay in the
    denominator of the loss, which counts every trainable token of the batch: skipping must not make the other samples
    weigh more.

    Raises:
        ValueError: fewer than two rewards, or one that is not finite.
    """
    if len(rewards) < 2:
        raise ValueError(f"a group of {len(rewards)} has no mean to compare with; two samples are the least")
    if not all(math.isfinite(reward) for reward in rewards):
        raise ValueError(f"rewards must be finite, got {list(rewards)}")
    if rewards_are_equal(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def standardised(rewards: Sequence[float]) -> list[float]:
    """(reward - mean) / (standard deviation + 1e-4) in a group (GRPO, Shao et al. 2024, section 4.1.2). The standard
    deviation is the sample's (n - 1). Raises as `centred`."""
    differences = centred(rewards)
    std = math.sqrt(math.fsum(difference**2 for difference in differences) / (len(rewards) - 1))
    return [difference / (std + STD_EPSILON) for difference in differences]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """reward - mean of the others of its group (RLOO, Ahmadian et al. 2024, Eq 6). Raises as `centred`."""
    scale = len(rewards) / (len(rewards) - 1) if len(rewards) > 1 else 1.0
    return [scale * difference for difference in centred(rewards)]


GroupAdvantages = Callable[[Sequence[float]], list[float]]
"""From the rewards of a group, in the order of its samples."""

TRAINS_TRUNCATED: Mapping[str, bool] = {"train": True, "mask": False}
"""By `trainer.truncated`, what becomes of an answer that was cut at `max_tokens`.

`train`: trained with the reward it got. `mask`: neither in the loss nor in its denominator, counted as
dropped.truncated. Its reward counts in its group's mean and deviation either way: the prompt was that hard.
"""
