import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from trainer_svc.advantages import TRAINS_TRUNCATED, centred, leave_one_out, rewards_are_equal, standardised
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
