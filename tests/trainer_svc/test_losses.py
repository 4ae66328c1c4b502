import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trainer_svc.algorithms import ALGORITHMS
from trainer_svc.losses import (
    AGGREGATIONS,
    KL_ESTIMATORS,
    MAX_NAMES,
    OFF_POLICY,
    SUM_NAMES,
    SURROGATES,
    VALUE_SUM_NAMES,
    ClipRange,
    KlLoss,
    PolicyObjective,
    TokensOfSamples,
    aggregation_of,
    kl_k3,
    policy_loss,
    token_ratio,
    value_loss,
)
from trainer_svc.token_logprobs import token_logprobs

CLIP = ClipRange(0.2, 0.2)


def _token_losses(algorithm, logprobs, behaviour, advantages, clip=CLIP):
    """Of one answer, (tokens,)."""
    surrogate, trained = SURROGATES[algorithm], torch.ones_like(logprobs, dtype=torch.bool)
    whose = TokensOfSamples(trained, torch.zeros_like(logprobs, dtype=torch.int64), 1)
    return surrogate.loss(surrogate.ratio(logprobs - behaviour, whose), logprobs, advantages, clip)


def test_inside_the_clip_range_the_gradient_is_the_policy_gradient():
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    advantages = torch.tensor([0.5, -0.5])
    _token_losses("grpo", logprobs, logprobs.detach(), advantages).sum().backward()
    torch.testing.assert_close(logprobs.grad, -advantages)


@pytest.mark.parametrize(
    ("ratio", "advantage", "moves"), [(1.3, 1.0, False), (1.3, -1.0, True), (0.7, -1.0, False), (0.7, 1.0, True)]
)
def test_a_token_stops_moving_when_it_has_moved_too_far_in_the_wanted_direction(ratio, advantage, moves):
    logprobs = torch.tensor([math.log(ratio)], requires_grad=True)
    _token_losses("grpo", logprobs, torch.zeros(1), torch.tensor([advantage])).sum().backward()
    assert bool(logprobs.grad.abs() > 0) == moves


def test_an_extreme_ratio_stays_finite():
    loss = _token_losses("grpo", torch.tensor([0.0]), torch.tensor([-1e4]), torch.tensor([-1.0]))
    assert torch.isfinite(loss).all()


@given(st.floats(-5, 5))
def test_the_kl_estimate_is_never_negative(difference):
    kl = kl_k3(torch.tensor(0.0, dtype=torch.float64), torch.tensor(difference, dtype=torch.float64)).item()
    assert kl >= 0
    assert kl == pytest.approx(math.expm1(difference) - difference, abs=1e-12)


@dataclass(frozen=True)
class Tokens:
    """Of rows that hold an answer each."""

    behaviour_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    own_version: Tensor
    proximal_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None

    @property
    def num_samples(self):
        return len(self.weights)

    @property
    def sample_index(self):
        return torch.arange(self.num_samples)[:, None].expand(self.weights.shape)


def _micro_batch_loss(
    logprobs,
    behaviour,
    advantages,
    weights,
    own,
    algorithm="grpo",
    clip=CLIP,
    off_policy="ratio",
    limit=2.0,
    kl=None,
    **optional,
):
    objective = PolicyObjective(SURROGATES[algorithm], clip, OFF_POLICY[off_policy], limit, kl)
    by_token = advantages[:, None].expand(weights.shape) if advantages.ndim == 1 else advantages
    tokens = Tokens(behaviour, by_token, weights, own, **optional)
    return policy_loss(objective, logprobs, torch.ones_like(logprobs), tokens)


def test_padding_adds_nothing_even_where_the_model_says_nonsense():
    logprobs = torch.tensor([[-1.0, -1e30]], requires_grad=True)
    weights = torch.tensor([[1.0, 0.0]])
    own = torch.tensor([[True, True]])
    loss, sums, maxima = _micro_batch_loss(logprobs, torch.tensor([[-1.1, 0.0]]), torch.tensor([2.0]), weights, own)
    loss.backward()
    named = dict(zip(SUM_NAMES, sums.tolist(), strict=True))
    assert named["num_tokens"] == named["num_own_tokens"] == 1
    assert named["abs_diff"] == pytest.approx(0.1, abs=1e-6)
    assert maxima.tolist() == pytest.approx([0.1, 0.1], abs=1e-6)
    assert logprobs.grad[0, 1] == 0
    assert logprobs.grad[0, 0] == pytest.approx(-2.0 * math.exp(0.1), abs=1e-5)


def test_mismatch_is_counted_apart_for_tokens_of_the_own_version():
    logprobs, behaviour = torch.tensor([[-1.0, -2.0, -3.0]]), torch.tensor([[-1.001, -2.5, -3.0]])
    own = torch.tensor([[True, False, True]])
    _, sums, maxima = _micro_batch_loss(logprobs, behaviour, torch.tensor([1.0]), torch.ones(1, 3), own)
    named = dict(zip(SUM_NAMES, sums.tolist(), strict=True)) | dict(zip(MAX_NAMES, maxima.tolist(), strict=True))
    assert named["num_own_tokens"] == 2
    assert named["own_abs_diff"] == pytest.approx(0.001, abs=1e-6)
    assert named["own_abs_diff_max"] == pytest.approx(0.001, abs=1e-6)
    assert named["abs_diff_max"] == pytest.approx(0.5, abs=1e-6)


def test_the_clip_fraction_counts_only_tokens_whose_gradient_is_cut():
    logprobs = torch.log(torch.tensor([[1.3, 1.3], [0.7, 0.7]]))
    advantages = torch.tensor([1.0, 1.0])
    _, sums, _ = _micro_batch_loss(logprobs, torch.zeros(2, 2), advantages, torch.ones(2, 2), torch.ones(2, 2).bool())
    assert dict(zip(SUM_NAMES, sums.tolist(), strict=True))["clipped"] == 2


@pytest.mark.parametrize("algorithm", sorted(SURROGATES))
@given(data=st.data())
def test_any_cut_into_micro_batches_has_the_gradient_of_the_whole_batch(algorithm, data):
    """In float64, of a softmax policy with one shared table of logits, at 1e-9."""
    off_policy = data.draw(st.sampled_from(sorted(OFF_POLICY)))
    estimator = data.draw(st.sampled_from([None, *KL_ESTIMATORS]))
    kl = None if estimator is None else KlLoss(KL_ESTIMATORS[estimator], 0.3)
    has_proximal = data.draw(st.booleans())
    rule = aggregation_of(data.draw(st.sampled_from(AGGREGATIONS)), 16)
    batch = data.draw(BATCHES)
    advantages = [batch.normal(length) for length in batch.lengths]

    def loss(rows, parameters, weights):
        logits = parameters[: weights.shape[1]].expand(*weights.shape, 7)
        logprobs, _ = token_logprobs(logits, batch.padded(batch.targets, rows), temperature=0.8)
        return _micro_batch_loss(
            logprobs,
            batch.padded(batch.behaviour, rows),
            batch.padded(advantages, rows),
            weights,
            weights > 0,
            algorithm,
            off_policy=off_policy,
            kl=kl,
            proximal_logprobs=batch.padded(batch.proximal, rows) if has_proximal else None,
            reference_logprobs=None if kl is None else batch.padded(batch.reference, rows),
        )[0]

    torch.testing.assert_close(
        batch.gradient(batch.cuts, rule, loss),
        batch.gradient([range(len(batch.lengths))], rule, loss),
        rtol=0,
        atol=1e-9,
    )


@given(data=st.data())
def test_any_cut_into_micro_batches_has_the_critics_gradient_of_the_whole_batch(data):
    rule = aggregation_of(data.draw(st.sampled_from(AGGREGATIONS)), 16)
    clip = data.draw(st.sampled_from([0.1, math.inf]))
    batch = data.draw(BATCHES)

    def loss(rows, parameters, weights):
        values = parameters[: weights.shape[1], 0].expand(weights.shape)
        old, returns = batch.padded(batch.proximal, rows), batch.padded(batch.behaviour, rows)
        return value_loss(values, old, returns, weights, clip=clip)[0]

    torch.testing.assert_close(
        batch.gradient(batch.cuts, rule, loss),
        batch.gradient([range(len(batch.lengths))], rule, loss),
        rtol=0,
        atol=1e-9,
    )


class Batch:
    """Answers of a policy whose logits are one table, by position and token; and an order and a cut of them."""

    def __init__(self, seed, lengths, order, boundaries):
        self._generator = torch.Generator().manual_seed(seed)
        self.lengths = lengths
        self.table = self.normal(max(lengths), 7)
        self.targets = [torch.randint(0, 7, (length,), generator=self._generator) for length in lengths]
        self.behaviour, self.proximal, self.reference = (
            [-self.normal(length).abs() - 0.5 for length in lengths] for _ in range(3)
        )
        edges = [0, *sorted(boundaries), len(lengths)]
        self.cuts = [order[start:end] for start, end in itertools.pairwise(edges) if end > start]

    def normal(self, *shape):
        return torch.randn(shape, dtype=torch.float64, generator=self._generator)

    def padded(self, values, rows):
        return torch.nn.utils.rnn.pad_sequence([values[row] for row in rows], batch_first=True)

    def gradient(self, cuts, rule, loss):
        parameters = self.table.clone().requires_grad_()
        for rows in cuts:
            weights = self.padded(
                [torch.full((length,), rule.token_weight(length)).double() for length in self.lengths], rows
            )
            loss(rows, parameters, weights).backward()
        return parameters.grad / sum(rule.count(length) for length in self.lengths)


@st.composite
def _batches(draw):
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=8))
    order = draw(st.permutations(range(len(lengths))))
    boundaries = draw(st.lists(st.integers(1, max(1, len(lengths) - 1)), unique=True, max_size=4))
    return Batch(draw(st.integers(0, 2**31)), lengths, order, boundaries)


BATCHES = _batches()


def test_aggregations_divide_as_their_names_say():
    lengths = [2, 8]
    token_losses = [[1.0] * 2, [3.0] * 8]
    means = {}
    for name in AGGREGATIONS:
        rule = aggregation_of(name, 16)
        total = sum(rule.token_weight(len(values)) * sum(values) for values in token_losses)
        means[name] = total / sum(rule.count(length) for length in lengths)
    assert means == pytest.approx({"token_mean": 2.6, "sequence_mean": 2.0, "sequence_sum": 26 / 16 / 2})


def test_the_upper_bound_may_be_higher_than_the_lower():
    logprobs = torch.log(torch.tensor([1.25, 1.35])).requires_grad_()
    _token_losses("grpo", logprobs, torch.zeros(2), torch.ones(2), ClipRange(0.2, 0.28)).sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-1.25, 0.0])


@pytest.mark.parametrize(("algorithm", "exponent"), [("gspo", 1 / 3), ("rloo", 1.0)])
def test_the_ratio_of_an_answer_is_its_likelihoods(algorithm, exponent):
    """GSPO, Eq 5 to 7, and RLOO over whole answers, written out for one answer with the loss of its sequence."""
    logprobs = torch.tensor([[-1.0, -2.0, -0.5]], dtype=torch.float64, requires_grad=True)
    behaviour = torch.tensor([[-1.1, -1.9, -0.6]], dtype=torch.float64)
    rule = aggregation_of("sequence_mean", 16)
    weights = torch.full((1, 3), rule.token_weight(3), dtype=torch.float64)
    loss, _, _ = _micro_batch_loss(
        logprobs, behaviour, torch.tensor([0.7]), weights, weights > 0, algorithm, ClipRange(0.5, 0.5)
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    ratio = math.exp(exponent * 0.1)
    assert loss.item() == pytest.approx(-0.7 * ratio)
    assert gradient.tolist()[0] == pytest.approx([-0.7 * ratio * exponent] * 3)


@pytest.mark.parametrize(("algorithm", "exponent"), [("gspo", 1 / 3), ("rloo", 1.0)])
@pytest.mark.parametrize(("off_policy", "weights"), [("truncated", [0.4, 1.0, 2.0]), ("masked", [0.0, 1.0, 0.0])])
def test_a_token_of_an_answer_that_has_one_ratio_has_a_weight_of_its_own(algorithm, exponent, off_policy, weights):
    importance = torch.tensor([[0.4, 1.0, 3.0]])
    logprobs = torch.full((1, 3), -1.0, requires_grad=True)
    thirds = torch.full((1, 3), 1 / 3)
    loss, _, _ = _micro_batch_loss(
        logprobs,
        -1.0 - importance.log(),
        torch.tensor([2.0]),
        thirds,
        thirds > 0,
        algorithm,
        off_policy=off_policy,
    )
    loss.backward()
    assert logprobs.grad.tolist()[0] == pytest.approx([-2.0 * exponent * weight for weight in weights])


def test_settings_know_whose_ratios_are_of_whole_answers():
    by_answer = {name for name, surrogate in SURROGATES.items() if surrogate.ratio is not token_ratio}
    assert {name for name, algorithm in ALGORITHMS.items() if algorithm.has_answer_ratio} == by_answer


def test_an_answers_ratio_leaves_padding_out():
    logprobs = torch.tensor([[-1.0, -50.0]])
    weights = torch.tensor([[1.0, 0.0]])
    for algorithm in ("gspo", "rloo"):
        loss, _, _ = _micro_batch_loss(
            logprobs, torch.tensor([[-1.0, 0.0]]), torch.tensor([1.0]), weights, weights > 0, algorithm
        )
        assert loss.item() == pytest.approx(-1.0)


def test_cispo_limits_a_tokens_weight_and_keeps_its_gradient():
    logprobs = torch.log(torch.tensor([[0.5, 1.0, 9.0]])).requires_grad_()
    ones = torch.ones(1, 3)
    loss, sums, _ = _micro_batch_loss(
        logprobs, torch.zeros(1, 3), torch.tensor([-2.0]), ones, ones > 0, "cispo", ClipRange(1.0, 4.0)
    )
    loss.backward()
    assert logprobs.grad.tolist()[0] == pytest.approx([1.0, 2.0, 10.0])
    assert dict(zip(SUM_NAMES, sums.tolist(), strict=True))["clipped"] == 1


@pytest.mark.parametrize(
    ("off_policy", "weights"),
    [("truncated", [0.4, 1.0, 1.5, 2.0]), ("masked", [0.0, 1.0, 1.5, 0.0]), ("none", [1.0, 1.0, 1.0, 1.0])],
)
def test_a_token_weighs_what_the_batchs_first_policy_finds_it_likelier(off_policy, weights):
    importance = torch.tensor([[0.4, 1.0, 1.5, 3.0]])
    logprobs = torch.full((1, 4), -1.0, requires_grad=True)
    ones = torch.ones(1, 4)
    loss, sums, _ = _micro_batch_loss(
        logprobs, -1.0 - importance.log(), torch.tensor([2.0]), ones, ones > 0, off_policy=off_policy
    )
    loss.backward()
    assert logprobs.grad.tolist()[0] == pytest.approx([-2.0 * weight for weight in weights])
    named = dict(zip(SUM_NAMES, sums.tolist(), strict=True))
    assert named["importance"] == pytest.approx(5.9)
    assert named["importance_squared"] == pytest.approx(0.16 + 1 + 2.25 + 9)


@pytest.mark.parametrize(("name", "gradient_is_the_kls"), [("k1", False), ("k2", True), ("k3", False)])
def test_kl_estimates_have_the_kl_as_their_mean_and_k2_its_gradient(name, gradient_is_the_kls):
    """Over all tokens of a distribution, weighted by their probabilities: no sampling."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, dtype=torch.float64, generator=generator, requires_grad=True)
    reference = torch.log_softmax(torch.randn(9, dtype=torch.float64, generator=generator) * 0.1 + logits.detach(), -1)
    logprobs = torch.log_softmax(logits, -1)
    kl = (logprobs.exp() * (logprobs - reference)).sum()
    estimate = (logprobs.detach().exp() * KL_ESTIMATORS[name](logprobs, reference)).sum()
    assert estimate.item() == pytest.approx(kl.item(), rel=1e-6 if name != "k2" else 0.1)
    (expected,), (gradient,) = torch.autograd.grad(kl, logits, retain_graph=True), torch.autograd.grad(estimate, logits)
    assert torch.allclose(gradient, expected, atol=1e-12) == gradient_is_the_kls
    if name == "k1":
        assert torch.allclose(gradient, torch.zeros(9, dtype=torch.float64), atol=1e-12)


def test_the_kl_in_the_loss_is_weighted_like_the_tokens_and_by_its_coefficient():
    logprobs, reference = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
    weights = torch.tensor([[0.5, 0.5]])
    kl = KlLoss(KL_ESTIMATORS["k3"], 0.1)
    loss, sums, _ = _micro_batch_loss(
        logprobs, logprobs, torch.zeros(1), weights, weights > 0, kl=kl, reference_logprobs=reference
    )
    tokens = [math.exp(-0.5) - 1 + 0.5, math.exp(1.0) - 1 - 1.0]
    assert loss.item() == pytest.approx(0.1 * sum(tokens) / 2)
    named = dict(zip(SUM_NAMES, sums.tolist(), strict=True))
    assert (named["reference_kl"], named["num_reference_tokens"]) == (pytest.approx(sum(tokens)), 2)


def test_the_proximal_policy_is_what_decoupled_ratios_and_weights_are_of():
    logprobs = torch.log(torch.tensor([[0.5]])).requires_grad_()
    ones = torch.ones(1, 1)
    loss, sums, _ = _micro_batch_loss(
        logprobs,
        torch.log(torch.tensor([[0.25]])),
        torch.tensor([1.0]),
        ones,
        ones > 0,
        clip=ClipRange(0.2, 10.0),
        off_policy="truncated",
        proximal_logprobs=torch.log(torch.tensor([[0.3]])),
    )
    loss.backward()
    # (proximal / behaviour) * (present / proximal)
    assert logprobs.grad.item() == pytest.approx(-(0.3 / 0.25) * (0.5 / 0.3))
    assert dict(zip(SUM_NAMES, sums.tolist(), strict=True))["importance"] == pytest.approx(1.2)


def test_ppo_is_the_textbooks():
    """Written out token by token: Schulman et al. 2017, Eq 7, and the clipped value loss of its reference code."""
    generator = torch.Generator().manual_seed(0)
    old, new, values, old_values, returns = (torch.randn(6, dtype=torch.float64, generator=generator) for _ in range(5))
    old, new = old / 3 - 2, (old / 3 - 2 + new / 5).requires_grad_()
    values.requires_grad_()
    advantages = returns - old_values
    expected_loss, expected_value_loss = 0.0, 0.0
    for t in range(6):
        ratio = torch.exp(new[t] - old[t])
        expected_loss -= min(ratio * advantages[t], torch.clamp(ratio, 1 - 0.2, 1 + 0.2) * advantages[t])
        near = old_values[t] + torch.clamp(values[t] - old_values[t], -0.3, 0.3)
        expected_value_loss += 0.5 * max((values[t] - returns[t]) ** 2, (near - returns[t]) ** 2)
    weights = torch.ones(1, 6, dtype=torch.float64)
    loss, _, _ = _micro_batch_loss(new[None], old[None], advantages[None], weights, weights > 0, "ppo")
    critic_loss, sums = value_loss(values[None], old_values[None], returns[None], weights, clip=0.3)
    assert loss.item() == pytest.approx(expected_loss.item(), abs=1e-12)
    assert critic_loss.item() == pytest.approx(expected_value_loss.item(), abs=1e-12)
    for mine, theirs, parameter in ((loss, expected_loss, new), (critic_loss, expected_value_loss, values)):
        (gradient,), (expected,) = torch.autograd.grad(mine, parameter), torch.autograd.grad(theirs, parameter)
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)
    named = dict(zip(VALUE_SUM_NAMES, sums.tolist(), strict=True))
    assert named["squared_error"] == pytest.approx((values - returns).square().sum().item())
    assert 0 < named["clipped"] < 6
