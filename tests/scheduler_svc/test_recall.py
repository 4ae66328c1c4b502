"""Recall of the longest."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.recall import LEAST_PROMPTS, ForecastCheck, recall_of_longest

Lengths = st.lists(st.floats(1, 1e6), min_size=1, max_size=60)
Share = st.floats(0.01, 1.0)


@given(Lengths, Share)
def test_true_lengths_find_all(lengths: list[float], share: float) -> None:
    assert recall_of_longest(lengths, lengths, share) == 1.0


@given(Lengths, Share, st.randoms())
def test_it_is_a_share_of_the_longest(lengths: list[float], share: float, random: object) -> None:
    forecasts = list(lengths)
    random.shuffle(forecasts)  # type: ignore[attr-defined]
    recall = recall_of_longest(forecasts, lengths, share)
    count = max(1, int(share * len(lengths) + 0.5))
    assert 0 <= recall <= 1
    assert recall * count == pytest.approx(round(recall * count))
    assert recall_of_longest(forecasts, lengths, 1.0) == 1.0


def test_the_longest_fifth_of_ten_are_two() -> None:
    lengths = [float(length) for length in range(10)]
    forecasts = [*lengths[:8], 0.0, 20.0]
    assert recall_of_longest(forecasts, lengths, 0.2) == 0.5


def test_the_check_waits_for_enough_prompts_and_forgets_old_ones() -> None:
    check = ForecastCheck(most=LEAST_PROMPTS)
    for length in range(LEAST_PROMPTS):
        assert check.figures() is None
        check.add(-length, length)
    wrong = check.figures()
    assert wrong is not None and wrong.of_fifth == wrong.of_tenth == wrong.of_twentieth == 0.0
    for length in range(LEAST_PROMPTS):
        check.add(length, length)
    right = check.figures()
    assert right is not None and right.num_prompts == LEAST_PROMPTS
    assert right.of_fifth == right.of_tenth == right.of_twentieth == 1.0
