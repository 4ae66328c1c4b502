"""Tests of trainer_svc.prompt_cursor."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_svc.prompt_cursor import CursorState, draw, refill_order

SIZES = st.integers(1, 40)
DRAWS = st.lists(st.integers(1, 90), min_size=1, max_size=12)


@given(st.integers(0, 5), SIZES, DRAWS)
def test_every_epoch_covers_each_prompt_exactly_once(seed: int, num_prompts: int, counts: list[int]) -> None:
    state = CursorState(seed, num_prompts)
    by_epoch: dict[int, list[int]] = {}
    for _ in range(sum(counts)):
        (index,), state = draw(state, 1)
        by_epoch.setdefault(state.epoch, []).append(index)
    for epoch in range(state.epoch):
        assert sorted(by_epoch[epoch]) == list(range(num_prompts))


@given(st.integers(0, 5), SIZES, DRAWS)
def test_batches_use_up_epochs_evenly_and_skip_nothing(seed: int, num_prompts: int, counts: list[int]) -> None:
    state, total = CursorState(seed, num_prompts), Counter[int]()
    for count in counts:
        indices, state = draw(state, count)
        total.update(indices)
    left = num_prompts - state.position + len(state.deferred)
    assert sum(total.values()) == (state.epoch + 1) * num_prompts - left
    assert all(state.epoch <= total[index] <= state.epoch + 1 for index in range(num_prompts))


@given(st.integers(0, 5), SIZES, DRAWS)
def test_no_prompt_comes_twice_in_a_batch_when_avoidable(seed: int, num_prompts: int, counts: list[int]) -> None:
    state = CursorState(seed, num_prompts)
    for count in counts:
        indices, state = draw(state, count)
        times = Counter(indices)
        assert len(indices) == count
        assert max(times.values()) <= -(-count // num_prompts)


@given(st.integers(0, 5), SIZES, DRAWS, DRAWS)
def test_a_restored_state_goes_on_exactly(seed: int, num_prompts: int, before: list[int], after: list[int]) -> None:
    state = CursorState(seed, num_prompts)
    for count in before:
        _, state = draw(state, count)
    restored = CursorState.from_json(json.loads(json.dumps(state.to_json())), num_prompts)
    assert restored == state
    for count in after:
        expected, state = draw(state, count)
        found, restored = draw(restored, count)
        assert found == expected


def test_drawing_ahead_leaves_an_earlier_state_usable() -> None:
    frontier = CursorState(3, 10)
    batch_0, after_0 = draw(frontier, 4)
    draw(after_0, 9)
    assert draw(frontier, 4) == (batch_0, after_0)


def test_epochs_and_seeds_differ_in_order() -> None:
    first, state = draw(CursorState(0, 50), 50)
    second, _ = draw(state, 50)
    other_seed, _ = draw(CursorState(1, 50), 50)
    assert first != second
    assert first != other_seed


def test_another_data_set_size_is_refused_with_both_numbers() -> None:
    saved = CursorState(0, 10).to_json()
    with pytest.raises(ValueError, match=r"has 11 prompts and the checkpoint was made with 10"):
        CursorState.from_json(saved, 11)


def test_a_damaged_state_is_refused() -> None:
    with pytest.raises(ValueError, match="expected the keys"):
        CursorState.from_json({"seed": 0}, 10)
    with pytest.raises(ValueError, match="not a state"):
        CursorState(seed=0, num_prompts=10, position=11)
    with pytest.raises(ValueError, match="cannot put off"):
        CursorState(seed=0, num_prompts=10, deferred=(10,))
    with pytest.raises(ValueError, match="at least one prompt"):
        CursorState(seed=0, num_prompts=0)
    with pytest.raises(ValueError, match="at least one prompt"):
        draw(CursorState(seed=0, num_prompts=10), 0)


@given(st.integers(0, 5), SIZES, st.data())
def test_a_draw_has_allowed_prompts_alone_and_none_twice_when_avoidable(
    seed: int, num_prompts: int, data: st.DataObject
) -> None:
    state, total = CursorState(seed, num_prompts), Counter[int]()
    always = data.draw(st.integers(0, num_prompts - 1))
    for count in data.draw(DRAWS):
        allowed = np.array(data.draw(st.lists(st.booleans(), min_size=num_prompts, max_size=num_prompts)))
        allowed[always] = True
        indices, state = draw(state, count, allowed)
        times = Counter(indices)
        total.update(times)
        assert all(allowed[index] for index in indices)
        assert max(times.values()) <= -(-count // int(allowed.sum()))
        refills = refill_order(state, 0, indices, allowed)
        assert refills and all(allowed[index] for index in refills)
    with pytest.raises(ValueError, match="at least one prompt that may be drawn"):
        draw(state, 1, np.zeros(num_prompts, dtype=np.bool_))


@given(st.integers(0, 5), SIZES, DRAWS)
def test_epochs_cover_what_is_always_allowed_once(seed: int, num_prompts: int, counts: list[int]) -> None:
    state, by_epoch = CursorState(seed, num_prompts), dict[int, list[int]]()
    allowed = np.arange(num_prompts) % 3 == 0
    for _ in range(sum(counts)):
        (index,), state = draw(state, 1, allowed)
        by_epoch.setdefault(state.epoch, []).append(index)
    for epoch in range(state.epoch):
        assert sorted(by_epoch[epoch]) == list(range(0, num_prompts, 3))
