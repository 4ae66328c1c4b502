import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer_svc import losses
from trainer_svc.losses import (
    AGGREGATIONS,
    MAX_NAMES,
    OFF_POLICY,
    SUM_NAMES,
    SURROGATES,
    ClipRange,
    TokensOfSamples,
    aggregation_of,
    approximate_kl,
    policy_loss,
    token_logprobs,
)

CLIP = ClipRange(0.2, 0.2)


def _token_losses(algorithm, logprobs, behaviour, advantages, clip=CLIP):
    """Of one answer, (tokens,)."""
    surrogate, trained = SURROGATES[algorithm], torch.ones_like(logprobs, dtype=torch.bool)
    whose = TokensOfSamples(trained, torch.zeros_like(logprobs, dtype=torch.int64), 1)
    return surrogate.loss(surrogate.ratio(logprobs - behaviour, whose), logprobs, advantages, clip)


def _reference_logprobs(logits, targets, temperature):
    return torch.log_softmax(logits / temperature, dim=-1).gather(-1, targets[..., None]).squeeze(-1)


@pytest.mark.parametrize("chunk_elements", [1, 30, 1 << 22])
def test_token_logprobs_and_their_gradient_are_those_of_log_softmax(monkeypatch, chunk_elements):
    monkeypatch.setattr(losses, "_CHUNK_ELEMENTS", chunk_elements)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 11, dtype=torch.float64, generator=generator, requires_grad=True)
    targets = torch.randint(0, 11, (3, 5), generator=generator)
    logprobs, entropies = token_logprobs(logits, targets, temperature=0.7)
    reference = _reference_logprobs(logits, targets, 0.7)
    torch.testing.assert_close(logprobs, reference, rtol=0, atol=1e-12)
    distribution = torch.distributions.Categorical(logits=logits.detach() / 0.7)
    torch.testing.assert_close(entropies, distribution.entropy(), rtol=0, atol=1e-12)
    assert not entropies.requires_grad
    weights = torch.randn(3, 5, dtype=torch.float64, generator=generator)
    (gradient,) = torch.autograd.grad((logprobs * weights).sum(), logits)
    (expected,) = torch.autograd.grad((reference * weights).sum(), logits)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


def test_bfloat16_logits_are_normalised_in_float32():
    logits = (torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)) * 5).bfloat16()
    targets = torch.arange(4)
    logprobs, entropies = token_logprobs(logits, targets, temperature=1.0)
    assert logprobs.dtype == entropies.dtype == torch.float32
    torch.testing.assert_close(logprobs, _reference_logprobs(logits.float(), targets, 1.0), rtol=0, atol=1e-5)


def test_a_token_that_cannot_be_drawn_adds_nothing_to_the_entropy():
    logits = torch.tensor([[0.0, 0.0, -math.inf]])
    _, entropies = token_logprobs(logits, torch.tensor([0]), temperature=1.0)
    assert entropies.item() == pytest.approx(math.log(2))


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
    kl = approximate_kl(torch.tensor(difference, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)).item()
    assert kl >= 0
    assert kl == pytest.approx(math.expm1(difference) - difference, abs=1e-12)


def _micro_batch_loss(
    logprobs, behaviour, advantages, weights, own, algorithm="grpo", clip=CLIP, off_policy="ratio", limit=2.0
):
    sample_index = torch.arange(len(advantages))[:, None].expand(logprobs.shape)
    return policy_loss(
        SURROGATES[algorithm],
        logprobs,
        torch.ones_like(logprobs),
        behaviour,
        advantages,
        sample_index,
        weights,
        own,
        clip=clip,
        off_policy=OFF_POLICY[off_policy],
        importance_limit=limit,
    )


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
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(data=st.data())
def test_any_cut_into_micro_batches_has_the_gradient_of_the_whole_batch(aggregation, algorithm, data):
    """In float64, of a softmax policy with one shared table of logits, at 1e-9."""
    off_policy = data.draw(st.sampled_from(sorted(OFF_POLICY)))
    rule = aggregation_of(aggregation, 16)
    seed = data.draw(st.integers(0, 2**31))
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=8))
    order = data.draw(st.permutations(range(len(lengths))))
    boundaries = data.draw(st.lists(st.integers(1, max(1, len(lengths) - 1)), unique=True, max_size=4))
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(max(lengths), 7, dtype=torch.float64, generator=generator)
    targets = [torch.randint(0, 7, (length,), generator=generator) for length in lengths]
    behaviour = [-torch.rand(length, dtype=torch.float64, generator=generator) * 3 for length in lengths]
    advantages = torch.randn(len(lengths), dtype=torch.float64, generator=generator)
    count = sum(rule.count(length) for length in lengths)

    def gradient(cuts):
        parameters = table.clone().requires_grad_()
        for rows in cuts:
            width = max(lengths[row] for row in rows)
            padded_targets = torch.zeros(len(rows), width, dtype=torch.int64)
            padded_behaviour = torch.zeros(len(rows), width, dtype=torch.float64)
            weights = torch.zeros(len(rows), width, dtype=torch.float64)
            for index, row in enumerate(rows):
                padded_targets[index, : lengths[row]] = targets[row]
                padded_behaviour[index, : lengths[row]] = behaviour[row]
                weights[index, : lengths[row]] = rule.token_weight(lengths[row])
            logits = parameters[:width].expand(len(rows), width, 7)
            logprobs, _ = token_logprobs(logits, padded_targets, temperature=0.8)
            loss, _, _ = _micro_batch_loss(
                logprobs,
                padded_behaviour,
                advantages[list(rows)],
                weights,
                weights > 0,
                algorithm,
                off_policy=off_policy,
            )
            loss.backward()
        return parameters.grad / count

    edges = [0, *sorted(boundaries), len(lengths)]
    cuts = [order[start:end] for start, end in itertools.pairwise(edges) if end > start]
    torch.testing.assert_close(gradient(cuts), gradient([range(len(lengths))]), rtol=0, atol=1e-9)


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
