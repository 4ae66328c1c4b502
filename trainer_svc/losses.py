"""Losses of policy and critic: pure functions over tensors, one table for each choice that settings make by name.

Everything here is a sum that nobody has divided yet. Sums of micro-batches add up to the sum of the batch however it
was cut; the division by the batch's count happens once an optimizer step, in trainer_svc/sharded_model.py. What a
sample weighs in the sum and in the count is its `Aggregation`. How advantages come about is trainer_svc/advantages.py;
what makes an algorithm of the two, trainer_svc/algorithms.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_MAX_LOG_RATIO = 20.0
"""Log-ratios are limited to this before exp: e^20 is far outside any clip range, and stays finite in float32."""

SUM_NAMES = (
    "loss",
    "num_tokens",
    "clipped",
    "kl",
    "reference_kl",
    "num_reference_tokens",
    "entropy",
    "importance",
    "importance_squared",
    "importance_limited",
    "abs_diff",
    "num_own_tokens",
    "own_abs_diff",
    "own_kl",
)
"""Sums over trainable tokens that `policy_loss` returns beside the loss, in this order.

`loss` is weighted by the aggregation, the others count each token once. `kl` is between generator and trainer,
`reference_kl` between trainer and reference, on the tokens where there is one, both by k3. `importance` is how much
likelier the policy at the batch's start finds a token than the generator did, `importance_limited` counts where that is
above `importance_limit` or below its inverse. `abs_diff` is |log-prob difference| between trainer and generator; the
`own` ones are over tokens that the generator drew under the very version being trained, where any difference is
numerical mismatch rather than staleness.
"""

MAX_NAMES = ("abs_diff_max", "own_abs_diff_max")
"""Maxima over the same tokens; 0 without tokens."""


@dataclass(frozen=True)
class ClipRange:
    """Ratios from 1 - low to 1 + high are left alone."""

    low: float
    high: float

    def __call__(self, ratio: Tensor) -> Tensor:
        return ratio.clamp(1 - self.low, 1 + self.high)


@dataclass(frozen=True)
class TokensOfSamples:
    """Which tokens of a micro-batch are trained, and whose they are. Shapes (rows, tokens)."""

    trained: Tensor
    """Bool."""
    sample_index: Tensor
    """Int64, below `num_samples`; any where a token is not trained."""
    num_samples: int

    def sums(self, values: Tensor) -> Tensor:
        """At each token the sum of the values over all trained tokens of its sample, (rows, tokens)."""
        totals = values.new_zeros(self.num_samples)
        totals = totals.index_add(0, self.sample_index.flatten(), (values * self.trained).flatten())
        return totals[self.sample_index]


def token_ratio(log_ratio: Tensor, tokens: TokensOfSamples) -> Tensor:
    """How much likelier each token has become, (rows, tokens)."""
    del tokens
    return _exp(log_ratio)


def sequence_mean_ratio(log_ratio: Tensor, tokens: TokensOfSamples) -> Tensor:
    """How much likelier a sample has become, to the power of 1 / its length: the geometric mean of its tokens' ratios
    (GSPO, Zheng et al. 2025, Eq 7), at each of them. (rows, tokens). A token has its own share of the gradient (Eq 14),
    so that what is done to its loss is done to it alone."""
    mean = tokens.sums(log_ratio.detach()) / _lengths(log_ratio, tokens)
    return _exp(mean + log_ratio - log_ratio.detach())


def sequence_ratio(log_ratio: Tensor, tokens: TokensOfSamples) -> Tensor:
    """How much likelier a sample has become: the product of its tokens' ratios, at each of them. (rows, tokens). A
    token has its own share of the gradient, times their number: their mean has the gradient of the product."""
    total = tokens.sums(log_ratio.detach())
    return _exp(total + (log_ratio - log_ratio.detach()) * _lengths(log_ratio, tokens))


def _lengths(log_ratio: Tensor, tokens: TokensOfSamples) -> Tensor:
    return tokens.sums(torch.ones_like(log_ratio)).clamp_min(1)


def clipped_surrogate(ratio: Tensor, logprobs: Tensor, advantages: Tensor, clip: ClipRange) -> Tensor:
    """-min(r A, clip(r) A) (PPO, Schulman et al. 2017, Eq 7; with a higher upper bound DAPO, Yu et al. 2025, Eq 8)."""
    del logprobs
    return -torch.minimum(ratio * advantages, clip(ratio) * advantages)


def clipped_weight(ratio: Tensor, logprobs: Tensor, advantages: Tensor, clip: ClipRange) -> Tensor:
    """-sg(clip(r)) A ln pi: no token loses its gradient, its weight alone is limited (CISPO, MiniMax-M1 2025, Eq 4)."""
    return -clip(ratio.detach()) * advantages * logprobs


@dataclass(frozen=True)
class Surrogate:
    """A policy loss: what the ratio is of, and what becomes of it. What it is a ratio to is `OffPolicy`'s affair."""

    ratio: Callable[[Tensor, TokensOfSamples], Tensor]
    """Of each token's log-ratio and whose it is; (rows, tokens)."""
    loss: Callable[[Tensor, Tensor, Tensor, ClipRange], Tensor]
    """Of (ratio, log-probs, advantages, clip), each (rows, tokens); the same."""
    clips_gradient: bool
    """Whether a ratio outside the range has no gradient when it has moved in the wanted direction."""


SURROGATES: Mapping[str, Surrogate] = {
    "grpo": Surrogate(token_ratio, clipped_surrogate, clips_gradient=True),
    "dr_grpo": Surrogate(token_ratio, clipped_surrogate, clips_gradient=True),
    "dapo": Surrogate(token_ratio, clipped_surrogate, clips_gradient=True),
    "reinforce_pp": Surrogate(token_ratio, clipped_surrogate, clips_gradient=True),
    "ppo": Surrogate(token_ratio, clipped_surrogate, clips_gradient=True),
    "rloo": Surrogate(sequence_ratio, clipped_surrogate, clips_gradient=True),
    "gspo": Surrogate(sequence_mean_ratio, clipped_surrogate, clips_gradient=True),
    "cispo": Surrogate(token_ratio, clipped_weight, clips_gradient=False),
}
"""By `trainer.algorithm`."""


@dataclass(frozen=True)
class OffPolicy:
    """How tokens are treated that another distribution drew than the one that is trained: because their version is
    older, or because the generator computes a little differently.

    The policy at the batch's start is called proximal. With one optimizer step a batch it is the present one, without
    its gradient; with several its log-probs are computed before the first of them.
    """

    ratio_to_generator: bool
    """Whether the surrogate's ratio is to the generator's log-probs, so that its clip limits the correction; else it is
    to the proximal policy (decoupled loss: Hilton et al. 2022; AReaL, Fu et al. 2025, Eq 5)."""
    weight: Callable[[Tensor, float], Tensor] | None = None
    """Of each token's importance (how much likelier the proximal policy finds it than the generator did) and its limit;
    it multiplies the token's loss."""


OFF_POLICY: Mapping[str, OffPolicy] = {
    "ratio": OffPolicy(ratio_to_generator=True),
    # Truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL").
    "truncated": OffPolicy(ratio_to_generator=False, weight=lambda importance, limit: importance.clamp_max(limit)),
    # IcePop (Ring-1T, Ling team 2025, Eq 3): tokens that the two see too differently teach nothing.
    "masked": OffPolicy(
        ratio_to_generator=False,
        weight=lambda importance, limit: importance * ((importance <= limit) & (importance >= 1 / limit)),
    ),
    "none": OffPolicy(ratio_to_generator=False),
}
"""By `trainer.off_policy`, `auto` resolved."""


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def kl_k1(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """KL(policy || other), a token, from tokens that the policy drew: ln of the ratio. Unbiased, of any sign; as a loss
    its gradient is 0 on average (Schulman 2020, "Approximating KL divergence")."""
    return logprobs - other_logprobs


def kl_k2(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """The same by half the square of the ratio's ln: biased, of little variance; as a loss its gradient is that of the
    KL."""
    return (logprobs - other_logprobs).square() / 2


def kl_k3(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """The same by r - 1 - ln r with r = other / policy: unbiased, of little variance, never negative."""
    log_ratio = (other_logprobs - logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    # expm1: near 0 the rest of exp(x) - 1 - x would be rounding.
    return log_ratio.expm1() - log_ratio


KlEstimator = Callable[[Tensor, Tensor], Tensor]

KL_ESTIMATORS: Mapping[str, KlEstimator] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
"""By `trainer.kl_estimator`. Each (...), of the policy's and the other's log-probs of the tokens (...)."""


@dataclass(frozen=True)
class KlLoss:
    """A term of the loss: coefficient times the estimated KL(policy || reference) of each token (GRPO, Shao et al.
    2024, Eq 4)."""

    estimator: KlEstimator
    coefficient: float


class PolicyTokens(Protocol):
    """The tokens of a micro-batch, as `policy_loss` reads them; trainer_svc/microbatches.py makes them."""

    @property
    def behaviour_logprobs(self) -> Tensor:
        """(rows, tokens), of the distribution that was sampled."""

    @property
    def advantages(self) -> Tensor:
        """(rows, tokens)."""

    @property
    def weights(self) -> Tensor:
        """(rows, tokens), 0 where a token is not trained (prompt, padding)."""

    @property
    def own_version(self) -> Tensor:
        """(rows, tokens), bool: drawn under the version being trained."""

    @property
    def sample_index(self) -> Tensor:
        """(rows, tokens), int64: the sample that a token is of, below `num_samples`."""

    @property
    def num_samples(self) -> int: ...

    @property
    def proximal_logprobs(self) -> Tensor | None:
        """(rows, tokens), of the policy at the batch's start; None: it is the present one."""

    @property
    def reference_logprobs(self) -> Tensor | None:
        """(rows, tokens); None: there is no reference."""


@dataclass(frozen=True)
class PolicyObjective:
    """What `policy_loss` needs to know of the algorithm."""

    surrogate: Surrogate
    clip: ClipRange
    off_policy: OffPolicy
    importance_limit: float
    """Of `off_policy`'s weights, above 1."""
    kl: KlLoss | None = None
    """None: the reference, if there is one, is no part of the loss."""


def policy_loss(
    objective: PolicyObjective, logprobs: Tensor, entropies: Tensor, tokens: PolicyTokens
) -> tuple[Tensor, Tensor, Tensor]:
    """The un-normalised loss of a micro-batch and what is worth knowing of its tokens.

    Args:
        logprobs: (rows, tokens), differentiable.
        entropies: (rows, tokens).

    Returns:
        The loss, a scalar sum with its graph; the sums (len(SUM_NAMES),) and the maxima (len(MAX_NAMES),), detached.
    """
    off_policy, surrogate, clip = objective.off_policy, objective.surrogate, objective.clip
    trained, behaviour = tokens.weights > 0, tokens.behaviour_logprobs
    # A padded position holds whatever the model says there: its difference must not reach exp, where 0 * inf is nan.
    logprobs = torch.where(trained, logprobs, behaviour)
    present = logprobs.detach()
    proximal = (
        present if tokens.proximal_logprobs is None else torch.where(trained, tokens.proximal_logprobs, behaviour)
    )
    importance = _exp(proximal - behaviour)
    old_logprobs = behaviour if off_policy.ratio_to_generator else proximal
    ratio = surrogate.ratio(logprobs - old_logprobs, TokensOfSamples(trained, tokens.sample_index, tokens.num_samples))
    losses = surrogate.loss(ratio, logprobs, tokens.advantages, clip)
    if off_policy.weight is not None:
        losses = losses * off_policy.weight(importance, objective.importance_limit)
    reference = None
    assert objective.kl is None or tokens.reference_logprobs is not None, "samples without reference log-probs"
    if tokens.reference_logprobs is not None:
        reference = torch.where(trained, tokens.reference_logprobs, present)
        if objective.kl is not None:
            losses = losses + objective.kl.coefficient * objective.kl.estimator(logprobs, reference)
    loss = (losses * tokens.weights).sum()
    with torch.no_grad():
        limit = objective.importance_limit
        limited = (importance > limit) | (importance < 1 / limit)
        absolute = (present - behaviour).abs()
        own = trained & tokens.own_version
        # The policy at the batch's start is the one that drew them.
        own_absolute = (proximal - behaviour).abs() * own
        behaviour_kl = kl_k3(behaviour, present)
        reference_kl = kl_k3(present, reference).sum() if reference is not None else loss.new_zeros(())
        above, below = ratio > 1 + clip.high, ratio < 1 - clip.low
        if surrogate.clips_gradient:
            sign = tokens.advantages.sign()
            above, below = above & (sign > 0), below & (sign < 0)
        sums = torch.stack(
            [
                loss.detach(),
                trained.sum(),
                (trained & (above | below)).sum(),
                behaviour_kl.sum(),
                reference_kl,
                trained.sum() if reference is not None else torch.zeros_like(trained.sum()),
                (entropies * trained).sum(),
                (importance * trained).sum(),
                (importance.square() * trained).sum(),
                (limited & trained).sum(),
                absolute.sum(),
                own.sum(),
                own_absolute.sum(),
                (kl_k3(behaviour, proximal) * own).sum(),
            ]
        )
        maxima = torch.stack([absolute.max(), own_absolute.max()])
    return loss, sums, maxima


VALUE_SUM_NAMES = ("loss", "num_tokens", "clipped", "squared_error", "returns", "returns_squared", "values")
"""Sums over trainable tokens that `value_loss` returns beside the loss; `loss` is weighted by the aggregation."""


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, *, clip: float
) -> tuple[Tensor, Tensor]:
    """The critic's un-normalised loss of a micro-batch: half the squared error, the larger of that of the value and of
    the value kept within `clip` of what it was at the batch's start (Schulman et al., PPO's reference code).

    Args:
        values: (rows, tokens), differentiable: of the state before each token.
        old_values, returns: (rows, tokens).
        weights: (rows, tokens), 0 where a token is not trained.
        clip: infinite: values are not kept anywhere.

    Returns:
        The loss, a scalar sum with its graph; the sums (len(VALUE_SUM_NAMES),), detached.
    """
    trained = weights > 0
    values = torch.where(trained, values, returns)
    kept = old_values + (values - old_values).clamp(-clip, clip)
    errors, kept_errors = (values - returns).square(), torch.where(trained, kept - returns, 0.0).square()
    loss = (torch.maximum(errors, kept_errors) * weights).sum() / 2
    with torch.no_grad():
        sums = torch.stack(
            [
                loss.detach(),
                trained.sum(),
                ((kept_errors > errors) & trained).sum(),
                errors.sum(),
                (returns * trained).sum(),
                (returns.square() * trained).sum(),
                (values * trained).sum(),
            ]
        )
    return loss, sums


@dataclass(frozen=True)
class Aggregation:
    """How tokens become one loss: sum of weight * token loss over the batch, divided by the sum of counts.

    Both are functions of a sample's number of trainable tokens.
    """

    token_weight: Callable[[int], float]
    count: Callable[[int], float]


AGGREGATIONS = ("token_mean", "sequence_mean", "sequence_sum")
"""By `trainer.loss_aggregation`."""


def aggregation_of(name: str, max_tokens: int) -> Aggregation:
    """The aggregation of a name in `AGGREGATIONS`.

    Args:
        max_tokens: longest answer: the constant that sums over sequences are divided by.
    """
    return {
        # Every token of the batch weighs the same (DAPO, Yu et al. 2025, Eq 8).
        "token_mean": Aggregation(token_weight=lambda _num_tokens: 1.0, count=float),
        # Every sample weighs the same: the mean over samples of the mean over tokens (GRPO, Shao et al. 2024, Eq 3).
        "sequence_mean": Aggregation(token_weight=lambda num_tokens: 1.0 / num_tokens, count=lambda _num_tokens: 1.0),
        # The mean over samples of the sum over tokens, over a constant: the length of an answer changes nothing in what
        # a token of it weighs (Dr. GRPO, Liu et al. 2025, section 3.1).
        "sequence_sum": Aggregation(token_weight=lambda _num_tokens: 1.0 / max_tokens, count=lambda _num_tokens: 1.0),
    }[name]
