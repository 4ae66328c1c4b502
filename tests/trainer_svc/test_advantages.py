import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from trainer_svc.advantages import ADVANTAGES, TRAINS_TRUNCATED, grpo_advantages, rewards_are_equal

_REWARDS = st.lists(st.floats(-10, 10), min_size=2, max_size=16)


@given(_REWARDS)
def test_advantages_are_rewards_normalised_in_their_group(rewards):
    assume(not rewards_are_equal(rewards))
    values = torch.tensor(rewards, dtype=torch.float64)
    expected = (values - values.mean()) / (values.std() + 1e-4)
    assert grpo_advantages(rewards) == pytest.approx(expected.tolist(), abs=1e-9)


@given(_REWARDS)
def test_advantages_of_a_group_add_up_to_nothing(rewards):
    assert sum(grpo_advantages(rewards)) == pytest.approx(0, abs=1e-6)


@given(st.floats(-10, 10), st.integers(2, 16))
def test_equal_rewards_have_advantages_of_exactly_zero(reward, num_samples):
    assert grpo_advantages([reward] * num_samples) == [0.0] * num_samples


def test_rewards_that_differ_by_rounding_are_equal():
    rewards = [0.1 + 0.2, 0.3, 0.3, 0.30000001]
    assert grpo_advantages(rewards) == [0.0] * 4


def test_a_small_real_difference_is_not_rounding():
    assert grpo_advantages([0.0, 0.01])[1] > 0


@pytest.mark.parametrize("rewards", [[], [1.0]])
def test_a_group_needs_two_samples(rewards):
    with pytest.raises(ValueError, match="two samples"):
        grpo_advantages(rewards)


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused(reward):
    with pytest.raises(ValueError, match="finite"):
        grpo_advantages([0.0, reward])


def test_the_tables_hold_what_settings_may_name():
    assert set(ADVANTAGES) == {"grpo"}
    assert TRAINS_TRUNCATED == {"train": True, "mask": False}
