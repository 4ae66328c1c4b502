import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from trainer_svc.advantages import (
    TRAINS_TRUNCATED,
    centred,
    generalised_advantages,
    leave_one_out,
    normalised,
    overlong_penalty,
    rewards_are_equal,
    standardised,
)
from trainer_svc.algorithms import ALGORITHMS
from trainer_svc.losses import AGGREGATIONS, SURROGATES

_REWARDS = st.lists(st.floats(-10, 10), min_size=2, max_size=16)


@given(_REWARDS)
def test_standardised_advantages_are_rewards_normalised_in_their_group(rewards):
    assume(not rewards_are_equal(rewards))
    values = torch.tensor(rewards, dtype=torch.float64)
    expected = (values - values.mean()) / (values.std() + 1e-4)
    assert standardised(rewards) == pytest.approx(expected.tolist(), abs=1e-9)


@given(_REWARDS)
def test_the_baseline_of_leave_one_out_is_the_mean_of_the_others(rewards):
    assume(not rewards_are_equal(rewards))
    others = [(sum(rewards) - reward) / (len(rewards) - 1) for reward in rewards]
    expected = [reward - mean for reward, mean in zip(rewards, others, strict=True)]
    assert leave_one_out(rewards) == pytest.approx(expected, abs=1e-9)


@given(_REWARDS)
def test_centred_advantages_keep_the_scale_of_the_rewards(rewards):
    assume(not rewards_are_equal(rewards))
    advantages = centred(rewards)
    assert max(advantages) - min(advantages) == pytest.approx(max(rewards) - min(rewards), abs=1e-9)


@pytest.mark.parametrize("advantages", [centred, leave_one_out, standardised])
@given(rewards=_REWARDS)
def test_advantages_of_a_group_add_up_to_nothing(advantages, rewards):
    assert sum(advantages(rewards)) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("advantages", [centred, leave_one_out, standardised])
@given(reward=st.floats(-10, 10), num_samples=st.integers(2, 16))
def test_equal_rewards_have_advantages_of_exactly_zero(advantages, reward, num_samples):
    assert advantages([reward] * num_samples) == [0.0] * num_samples


def test_rewards_that_differ_by_rounding_are_equal():
    rewards = [0.1 + 0.2, 0.3, 0.3, 0.30000001]
    assert standardised(rewards) == [0.0] * 4


def test_a_small_real_difference_is_not_rounding():
    assert standardised([0.0, 0.01])[1] > 0


@pytest.mark.parametrize("advantages", [centred, leave_one_out, standardised])
@pytest.mark.parametrize("rewards", [[], [1.0]])
def test_a_group_needs_two_samples(advantages, rewards):
    with pytest.raises(ValueError, match="two samples"):
        advantages(rewards)


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused(reward):
    with pytest.raises(ValueError, match="finite"):
        standardised([0.0, reward])


def test_the_tables_hold_what_settings_may_name():
    assert set(ALGORITHMS) == set(SURROGATES)
    assert {algorithm.loss_aggregation for algorithm in ALGORITHMS.values()} <= set(AGGREGATIONS)
    assert TRAINS_TRUNCATED == {"train": True, "mask": False}


@given(st.lists(st.integers(1, 8), min_size=1, max_size=5), st.floats(0, 1), st.floats(0, 1), st.integers(0, 2**31))
def test_generalised_advantages_are_the_textbooks(lengths, discount, trace, seed):
    """Each written out as the sum of what follows, for each answer alone."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(len(lengths), max(lengths), dtype=torch.float64, generator=generator) for _ in "rv")
    written = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    advantages, returns = generalised_advantages(rewards * written, values * written, discount=discount, trace=trace)
    for row, length in enumerate(lengths):
        reward, value = rewards[row, :length].tolist(), [*values[row, :length].tolist(), 0.0]
        deltas = [reward[t] + discount * value[t + 1] - value[t] for t in range(length)]
        expected = [
            sum((discount * trace) ** (later - t) * deltas[later] for later in range(t, length)) for t in range(length)
        ]
        assert advantages[row, :length].tolist() == pytest.approx(expected, abs=1e-9)
        assert returns[row, :length].tolist() == pytest.approx([a + v for a, v in zip(expected, value, strict=False)])
    assert (advantages * ~written == 0).all() and (returns * ~written == 0).all()


def test_without_a_critic_an_answers_return_is_its_reward_at_every_token():
    rewards = torch.tensor([[0.0, 0.0, 0.7]])
    advantages, returns = generalised_advantages(rewards, torch.zeros(1, 3), discount=1.0, trace=1.0)
    assert advantages.tolist() == returns.tolist() == [pytest.approx([0.7] * 3)]


def test_advantages_over_a_batch_have_mean_0_and_deviation_1_over_its_tokens():
    advantages = torch.tensor([[3.0, 1.0, 99.0], [-2.0, 0.5, 4.0]], dtype=torch.float64)
    trained = torch.tensor([[True, True, False], [True, True, True]])
    normal = normalised(advantages, trained)
    assert normal[0, 2] == 0
    assert normal[trained].mean().item() == pytest.approx(0, abs=1e-12)
    assert normal[trained].square().mean().item() == pytest.approx(1)


def test_a_batch_whose_advantages_differ_by_rounding_teaches_nothing():
    advantages = torch.tensor([[0.3, 0.1 + 0.2]], dtype=torch.float64)
    assert normalised(advantages, torch.ones(1, 2, dtype=torch.bool)).tolist() == [[0, 0]]


def test_an_answer_loses_reward_in_the_last_tokens_alone():
    penalties = [overlong_penalty(num_tokens, 100, 20) for num_tokens in (1, 80, 85, 100)]
    assert penalties == pytest.approx([0, 0, 0.25, 1])
    assert overlong_penalty(100, 100, 0) == 0
