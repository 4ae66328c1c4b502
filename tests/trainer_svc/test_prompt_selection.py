"""Tests of trainer_svc.prompt_selection."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_svc.prompt_selection import NOTHING_SHOWN, SelectionRules, SelectionState, allowed_prompts, observe

RIGHT, WRONG, MIXED = [1.0, 1.0], [0.0, 0.5], [1.0, 0.0]
LEVELS = np.array([0, 0, 1, 1, 2, 2])


def left_out(state: SelectionState, batch: int, num_prompts: int = 6) -> list[int]:
    allowed = allowed_prompts(state, batch, 1, num_prompts)
    return [] if allowed is None else [index for index in range(num_prompts) if not allowed[index]]


def test_prompts_that_are_always_or_never_solved_rest_for_a_while() -> None:
    rules = SelectionRules(delay=2, easy_pass_rate=1.0, hard_pass_rate=0.0, rest_iterations=3)
    state = observe(NOTHING_SHOWN, rules, 4, [(0, RIGHT), (1, WRONG), (2, MIXED), (3, [])])
    # Batch 5 has been drawn already.
    assert [left_out(state, batch) for batch in range(5, 10)] == [[], [0, 1], [0, 1], [0, 1], []]
    assert state.num_resting(6) == 2


def test_without_a_number_of_iterations_they_rest_for_good() -> None:
    state = observe(NOTHING_SHOWN, SelectionRules(delay=1, easy_pass_rate=0.5), 0, [(2, MIXED), (1, WRONG)])
    assert left_out(state, 1) == left_out(state, 10**6) == [2]


@pytest.mark.parametrize(("count", "expected"), [(2, [0, 3]), (3, [0, 1, 2, 3])])
def test_all_are_drawn_while_fewer_than_a_batch_needs_are_left(count: int, expected: list[int]) -> None:
    state = observe(NOTHING_SHOWN, SelectionRules(delay=1, easy_pass_rate=1.0), 0, [(1, RIGHT), (2, RIGHT)])
    allowed = allowed_prompts(state, 1, count, 4)
    assert allowed is not None
    assert [index for index in range(4) if allowed[index]] == expected


def test_the_next_level_begins_when_enough_of_the_last_answers_are_right() -> None:
    rules = SelectionRules(delay=2, level_accuracy=0.75, level_iterations=2)
    state, levels = NOTHING_SHOWN, []
    for batch, accuracy in enumerate([1.0, 0.25, 1.0, 0.5, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]):
        levels.append(state.level(batch))
        groups = [(0, [1.0] * round(4 * accuracy) + [0.0] * round(4 - 4 * accuracy))]
        state = observe(state, rules, batch, groups, num_levels=3)
    # Batches 2 and 3 made .75, and 4 was of level 0 still; 6 and 7 made 1.
    assert state.level_starts == (5, 9)
    assert levels == [0, 0, 0, 0, 0, 1, 1, 1, 1, 2]


def test_a_level_alone_is_drawn_from_and_never_less_than_one() -> None:
    state = SelectionState({4: ((0, None),), 5: ((0, None),), 2: ((0, None),)}, level_starts=(3, 5))

    def allowed(batch: int, count: int) -> list[int]:
        mask = allowed_prompts(state, batch, count, 6, LEVELS)
        assert mask is not None
        return [int(index) for index in np.flatnonzero(mask)]

    assert [allowed(batch, 1) for batch in (2, 3, 5)] == [[0, 1], [3], [4, 5]]
    assert allowed(3, 2) == [2, 3]


GROUPS = st.lists(st.tuples(st.integers(0, 5), st.sampled_from([RIGHT, WRONG, MIXED, []])), max_size=5)


@given(st.lists(GROUPS, max_size=12), st.integers(1, 3), st.integers(0, 4))
def test_a_state_survives_json_and_decides_a_batch_as_soon_as_it_may_be_drawn(
    batches: list[Any], delay: int, rest_iterations: int
) -> None:
    rules = SelectionRules(
        delay, easy_pass_rate=1.0, hard_pass_rate=0.0, rest_iterations=rest_iterations, level_accuracy=0.5
    )
    states = [NOTHING_SHOWN]
    for batch, groups in enumerate(batches):
        states.append(observe(states[-1], rules, batch, groups, num_levels=3))

    def decides(state: SelectionState, batch: int) -> list[bool]:
        allowed = allowed_prompts(state, batch, 2, 6, LEVELS)
        assert allowed is not None and allowed.any()
        return [bool(one) for one in allowed]

    for closed, state in enumerate(states):
        assert SelectionState.from_json(json.loads(json.dumps(state.to_json()))) == state
        # What is under way when a checkpoint is made was drawn from an earlier state.
        for batch in range(closed, closed + delay - 1):
            drawn_from = states[max(0, batch - delay + 1)]
            assert decides(drawn_from, batch) == decides(state, batch)
