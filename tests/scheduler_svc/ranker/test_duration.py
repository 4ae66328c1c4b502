"""Rates of ending, and what answers say of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.ranker.duration import (
    EDGES,
    NUM_STRETCHES,
    endings_and_exposure,
    length_quantiles,
    usual_rates,
)
from streamrl.planning.forecast import LEVELS, LengthForecast

Answers = st.lists(st.tuples(st.integers(1, 100_000), st.booleans()), min_size=1, max_size=20)


@given(Answers)
def test_each_answer_that_ended_ends_once_and_goes_through_all_before(answers: list[tuple[int, bool]]) -> None:
    lengths, cut = zip(*answers, strict=True)
    endings, exposure = endings_and_exposure([(lengths, cut)])
    assert endings.sum() == cut.count(False)
    assert (exposure >= 0).all()
    ends = np.where(cut, np.array(lengths) + 0.5, lengths)
    assert exposure.sum() == pytest.approx((np.log(ends) - EDGES[0]).sum())


@given(Answers)
def test_answers_together_say_what_they_say_alone(answers: list[tuple[int, bool]]) -> None:
    lengths, cut = zip(*answers, strict=True)
    each = endings_and_exposure([([length], [was_cut]) for length, was_cut in answers])
    together = endings_and_exposure([(lengths, cut)])
    for alone, summed in zip(each, together, strict=True):
        assert np.allclose(alone.sum(axis=0), summed[0])


@given(st.lists(st.floats(0.001, 50), min_size=NUM_STRETCHES, max_size=NUM_STRETCHES))
def test_quantiles_are_a_forecast(rates: list[float]) -> None:
    lengths = length_quantiles(np.array([rates]))
    assert lengths.shape == (1, len(LEVELS))
    assert lengths.min() >= 1
    LengthForecast(lengths)


def rates_of(lengths: np.ndarray, cut: np.ndarray) -> np.ndarray:
    endings, exposure = endings_and_exposure([(lengths, cut)])
    return usual_rates(endings[0], exposure[0])


def test_the_rates_of_answers_give_their_distribution_back() -> None:
    generator = np.random.default_rng(0)
    lengths = np.maximum(1, np.round(generator.lognormal(np.log(60), 0.7, 4000))).astype(int)
    rates = rates_of(lengths, np.zeros(len(lengths), dtype=bool))
    found = dict(zip(LEVELS, length_quantiles(rates[None])[0], strict=True))
    for level in (0.15, 0.5, 0.82, 0.95):
        assert found[level] == pytest.approx(np.quantile(lengths, level), rel=0.05)


def test_cut_answers_do_not_count_as_short() -> None:
    """Half of the answers are cut somewhere at random: the distribution of the whole ones is found all the same."""
    generator = np.random.default_rng(1)
    whole = np.maximum(1, np.round(generator.lognormal(np.log(60), 0.7, 8000))).astype(int)
    limits = np.maximum(1, np.round(generator.lognormal(np.log(60), 0.7, 8000))).astype(int)
    cut = whole > limits
    rates = rates_of(np.minimum(whole, limits), cut)
    found = dict(zip(LEVELS, length_quantiles(rates[None])[0], strict=True))
    for level in (0.15, 0.5, 0.82):
        assert found[level] == pytest.approx(np.quantile(whole, level), rel=0.08)
    assert np.quantile(np.minimum(whole, limits), 0.5) < 0.75 * np.quantile(whole, 0.5)
