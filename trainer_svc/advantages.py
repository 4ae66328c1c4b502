"""From rewards to advantages, in a group or over a whole batch, and which samples are trained: pure functions.

Losses are in trainer_svc/losses.py; rewards themselves in trainer_svc/rewards.py. When there is enough to compute an
advantage is decided in trainer_svc/batch_training.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

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


def generalised_advantages(
    rewards: "Tensor", values: "Tensor", *, discount: float, trace: float
) -> tuple["Tensor", "Tensor"]:
    """Generalised advantage estimation (Schulman et al. 2016, Eq 16): advantages of tokens, and returns to fit a critic
    to.

    With delta_t = reward_t + discount * value_{t+1} - value_t, an advantage is the sum of
    (discount * trace)^l * delta_{t+l} over what follows, and a return is advantage + value. An answer's last token ends
    it: nothing has a value after it. So has an answer that was cut.

    Args:
        rewards: (samples, tokens), of having written each token; 0 after an answer's end.
        values: (samples, tokens), of the state before each token; 0 after an answer's end. All 0: there is no critic,
            and with `trace` 1 the advantages are discounted returns.
        discount: gamma, 0 to 1.
        trace: lambda, 0 to 1.

    Returns:
        Advantages and returns, (samples, tokens); 0 after an answer's end.
    """
    import torch

    advantages = torch.zeros_like(values)
    following = torch.zeros_like(values[:, 0])
    next_values = torch.zeros_like(following)
    for token in range(values.shape[1] - 1, -1, -1):
        delta = rewards[:, token] + discount * next_values - values[:, token]
        following = delta + discount * trace * following
        advantages[:, token] = following
        next_values = values[:, token]
    return advantages, advantages + values


def normalised(advantages: "Tensor", trained: "Tensor") -> "Tensor":
    """(advantage - mean) / standard deviation over all trained tokens of a batch (REINFORCE++, Hu 2025, Eq 10; PPO as
    in Ouyang et al. 2022's code).

    When they are equal within the tolerance of rewards, all are 0.

    Args:
        advantages: (samples, tokens).
        trained: (samples, tokens), bool: at least one.

    Returns:
        (samples, tokens), 0 where a token is not trained.
    """
    chosen = advantages[trained]
    if float(chosen.max() - chosen.min()) <= EQUAL_REWARDS_TOLERANCE:
        return advantages * 0
    return (advantages - chosen.mean()) / chosen.std(correction=0) * trained


def overlong_penalty(num_tokens: int, max_tokens: int, buffer_tokens: int) -> float:
    """What an answer's reward loses for its length: 0 up to max_tokens - buffer_tokens, then linearly 1 at max_tokens
    (soft overlong punishment, DAPO, Yu et al. 2025, Eq 13, whose L_cache is the buffer). 0 without a buffer."""
    if buffer_tokens == 0:
        return 0.0
    return min(1.0, max(0.0, (num_tokens - (max_tokens - buffer_tokens)) / buffer_tokens))


TRAINS_TRUNCATED: Mapping[str, bool] = {"train": True, "mask": False}
"""By `trainer.truncated`, what becomes of an answer that was cut at `max_tokens`.

`train`: trained with the reward it got. `mask`: neither in the loss nor in its denominator, counted as
dropped.truncated. Its reward counts in its group's mean and deviation either way: the prompt was that hard. What is
normalised over a batch is so over trained tokens alone.
"""
