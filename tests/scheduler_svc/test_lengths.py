"""What is expected of lengths, from all that is known."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.lengths import PATIENCE_S, LengthEstimates, is_held_out, mixed, quantiles_of
from scheduler_svc.recall import LEAST_PROMPTS
from streamrl.identity import PURPOSE_TRAIN
from streamrl.planning.forecast import LEVELS, LengthForecast, mean_length
from streamrl.v1.records_pb2 import Prompt
from streamrl.v1.sample_pb2 import SamplingSettings

SteadyLengths = st.lists(st.floats(1, 1e5), min_size=len(LEVELS), max_size=len(LEVELS)).map(sorted)


def prompt(prompt_id: str, max_tokens: int = 1000) -> Prompt:
    sampling = SamplingSettings(max_tokens=max_tokens)
    return Prompt(purpose=PURPOSE_TRAIN, prompt_id=prompt_id, token_ids=[1, 2], sampling=sampling, num_samples=2)


def exactly(length: float) -> list[float]:
    return [length] * len(LEVELS)


def ready() -> LengthEstimates:
    estimates = LengthEstimates(uses_ranker=True)
    estimates.ranker_learned()
    return estimates


def learned_prompt(index: int) -> str:
    """The index-th prompt that is not held out."""
    return [prompt_id for prompt_id in map(str, range(1000)) if not is_held_out(prompt_id)][index]


def test_the_oracle_knows_and_the_rest_is_history() -> None:
    estimates = LengthEstimates(known_lengths={"a": [70.0], "b": [10.0, 30.0]})
    assert estimates.expected_tokens("a", 1000) == 70
    assert estimates.forecast("a", 50) == tuple(exactly(50.0))
    assert estimates.expected_tokens("b", 1000) == 20
    assert estimates.expected_tokens("c", 1000) == 1000
    estimates.history.observe("c", 0, 44)
    assert estimates.expected_tokens("c", 1000) == 44


def test_a_new_prompt_is_foretold_by_the_ranker() -> None:
    estimates = ready()
    estimates.history.observe("seen", 0, 10)
    estimates.take_forecasts([("new", exactly(300.0))])
    assert estimates.expected_tokens("new", 1000) == 300
    assert estimates.expected_tokens("new", 100) == 100
    assert estimates.expected_tokens("unknown", 1000) == 10


def test_ranker_and_history_are_weighed_by_how_far_they_were_off() -> None:
    estimates = ready()
    for index in range(400):
        prompt_id = learned_prompt(index)
        estimates.history.observe(prompt_id, 0, 50)
        estimates.take_forecasts([(prompt_id, exactly(200.0))])
        if index == 0:
            assert estimates.expected_tokens(prompt_id, 1000) == pytest.approx(100, rel=0.15)
        foretold = estimates.foretell(prompt(prompt_id))
        estimates.take_answers(prompt(prompt_id), 1, [(190, False), (210, False)], foretold)
    assert estimates.expected_tokens(learned_prompt(0), 1000) > 180


@given(SteadyLengths, SteadyLengths, st.floats(0, 1))
def test_a_mix_lies_between_its_forecasts(first: list[float], second: list[float], share: float) -> None:
    lengths = mixed(first, second, share)
    for mean, low, high in zip(lengths, map(min, first, second), map(max, first, second), strict=True):
        assert low * (1 - 1e-9) <= mean <= high * (1 + 1e-9)
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(lengths))


@given(st.lists(st.floats(1, 1e6), min_size=1, max_size=20))
def test_lengths_that_are_known_are_a_forecast(lengths: list[float]) -> None:
    found = quantiles_of(lengths)
    assert set(found) <= set(lengths)
    assert found[-1] == max(lengths)
    assert mean_length(found) == pytest.approx(LengthForecast([found]).mean[0])


def test_a_batch_waits_for_forecasts_of_new_prompts_and_not_for_long() -> None:
    estimates = ready()
    estimates.history.observe("seen", 0, 10)
    for prompt_id in ("seen", "new"):
        estimates.take_prompt(prompt(prompt_id))
    assert [estimates.awaits(prompt_id, 5.0) for prompt_id in ("seen", "new", "other")] == [False, True, False]
    requests = estimates.take_requests(5.0)
    assert [prompt_id for prompt_id, _ in requests.to_score] == ["seen", "new"]
    assert not estimates.has_requests
    assert estimates.awaits("new", 5.0)
    assert estimates.next_deadline(5.0) == 5.0 + PATIENCE_S
    assert not estimates.awaits("new", 5.0 + PATIENCE_S)
    estimates.take_forecasts([("seen", exactly(9.0)), ("new", exactly(9.0))])
    assert not estimates.awaits("new", 5.0)
    assert estimates.next_deadline(5.0) is None


def test_nobody_waits_for_a_ranker_that_knows_nothing_or_has_ended() -> None:
    estimates = LengthEstimates(uses_ranker=True)
    estimates.take_prompt(prompt("new"))
    assert not estimates.awaits("new", 0.0)
    estimates.ranker_learned()
    assert estimates.take_refresh() and not estimates.take_refresh()
    estimates.take_prompt(prompt("new"))
    estimates.take_requests(0.0)
    estimates.take_prompt(prompt("newer"))
    estimates.ranker_ended()
    assert not estimates.awaits("new", 0.0) and not estimates.awaits("newer", 0.0)
    assert estimates.next_deadline(0.0) is None and not estimates.has_requests


def test_answers_of_closed_batches_are_learned_from_except_those_held_out() -> None:
    estimates = LengthEstimates(uses_ranker=True)
    for index in range(320):
        estimates.take_answers(prompt(str(index)), 3, [(7, False), (9, True)], None)
    examples = estimates.take_requests(0.0).to_learn
    assert {example.prompt_id for example in examples} == {str(n) for n in range(320) if not is_held_out(str(n))}
    assert 5 <= 320 - len(examples) <= 40
    assert (examples[0].batch, examples[0].lengths, examples[0].cut) == (3, (7, 9), (False, True))


def test_recall_is_over_prompts_that_nothing_was_learned_of() -> None:
    estimates = ready()
    for index in range(2 * LEAST_PROMPTS):
        prompt_id, length = learned_prompt(index), 10 + index
        estimates.take_forecasts([(prompt_id, exactly(float(length)))])
        estimates.take_answers(prompt(prompt_id), 0, [(length, False)], estimates.foretell(prompt(prompt_id)))
    figures = estimates.recall()
    assert figures is not None and figures.num_prompts == 2 * LEAST_PROMPTS and figures.of_fifth == 1.0
    estimates.take_requests(0.0)
    again = prompt(learned_prompt(0))
    estimates.take_answers(again, 1, [(10, False)], estimates.foretell(again))
    assert estimates.recall() == figures


def test_what_an_earlier_life_learned_from_is_history_again() -> None:
    before, after = LengthEstimates(uses_ranker=True), LengthEstimates(uses_ranker=True)
    before.take_answers(prompt(learned_prompt(0)), 3, [(70, False), (90, False)], None)
    after.take_restored(before.take_requests(0.0).to_learn)
    assert after.expected_tokens(learned_prompt(0), 1000) == 80
    assert not after.foretell(prompt(learned_prompt(0))).is_new
