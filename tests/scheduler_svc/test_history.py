"""Expected lengths."""

from statistics import median_low

from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.history import LengthHistory
from streamrl.planning.forecast import LEVELS


def test_without_any_answer_the_longest_is_expected() -> None:
    assert LengthHistory().expected_tokens("p", max_tokens=256) == 256


def test_a_prompt_is_expected_to_be_answered_as_when_it_was_last_drawn() -> None:
    history = LengthHistory()
    for num_tokens in (10, 20):
        history.observe("p", batch=3, num_tokens=num_tokens)
    assert history.expected_tokens("p", max_tokens=256) == 15
    for num_tokens in (100, 120):
        history.observe("p", batch=9, num_tokens=num_tokens)
    history.observe("p", batch=3, num_tokens=30)
    assert history.expected_tokens("p", max_tokens=256) == 110


@given(st.lists(st.integers(1, 300), min_size=1))
def test_a_new_prompt_is_expected_at_the_median_of_all(lengths: list[int]) -> None:
    history = LengthHistory()
    for index, num_tokens in enumerate(lengths):
        history.observe(f"p{index}", batch=0, num_tokens=num_tokens)
    assert history.expected_tokens("new", max_tokens=10_000) == median_low(lengths)


@given(st.data(), st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 4), st.integers(1, 300))))
def test_the_order_in_which_answers_come_does_not_matter(
    data: st.DataObject, answers: list[tuple[str, int, int]]
) -> None:
    histories = LengthHistory(), LengthHistory()
    for history, ordered in zip(histories, (answers, data.draw(st.permutations(answers))), strict=True):
        for answer in ordered:
            history.observe(*answer)
    for prompt_id in "abcd":
        expected = [history.expected_tokens(prompt_id, max_tokens=200) for history in histories]
        assert expected[0] == expected[1]
        assert 1 <= expected[0] <= 200


def test_no_more_prompts_are_kept_than_asked_for() -> None:
    history = LengthHistory(most_prompts=2)
    for batch, prompt_id in enumerate("abca"):
        history.observe(prompt_id, batch, num_tokens=100 + batch)
    assert history.expected_tokens("c", max_tokens=256) == 102
    assert history.expected_tokens("b", max_tokens=256) == 101  # the median of 100, 101, 102, 103
    assert history.expected_tokens("a", max_tokens=256) == 103


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 4), st.integers(1, 300))), st.integers(1, 400))
def test_a_forecast_ascends_and_ends_at_the_most_tokens(answers: list[tuple[str, int, int]], max_tokens: int) -> None:
    history = LengthHistory()
    for answer in answers:
        history.observe(*answer)
    for prompt_id in "abc":
        lengths = history.forecast(prompt_id, max_tokens)
        assert len(lengths) == len(LEVELS)
        assert list(lengths) == sorted(lengths)
        assert lengths[0] >= 1 and lengths[-1] <= max_tokens


def test_a_forecast_is_as_wide_as_answers_were_found_apart() -> None:
    steady, wild = LengthHistory(), LengthHistory()
    for group in range(200):
        for batch in range(3):
            steady.observe(f"p{group}", batch, 100)
            wild.observe(f"p{group}", batch, 100 if (group + batch) % 2 else 1000)
    low, high = LEVELS.index(0.15), LEVELS.index(0.82)

    def width(history: LengthHistory) -> float:
        lengths = history.forecast("p1", max_tokens=100_000)
        return lengths[high] / lengths[low]

    assert width(steady) < 1.5 < 5 < width(wild)


def test_a_new_prompt_is_forecast_as_all_answers_were() -> None:
    history = LengthHistory()
    assert history.recent_quantile(0.9) is None
    for index in range(1, 101):
        history.observe(f"p{index}", batch=0, num_tokens=index)
    assert history.forecast("new", max_tokens=1000)[LEVELS.index(0.9)] == history.recent_quantile(0.9) == 90
