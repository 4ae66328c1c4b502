import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.planning.forecast import LengthForecast

_LEVELS = (0.0, 0.25, 0.5, 0.9, 1.0)
_FORECASTS = st.lists(st.lists(st.floats(1, 1000), min_size=5, max_size=5).map(sorted), min_size=1, max_size=5).map(
    lambda rows: LengthForecast(np.array(rows), _LEVELS)
)


@given(_FORECASTS, st.floats(0, 1200))
def test_survival_is_what_sampling_finds(forecast: LengthForecast, tokens: float) -> None:
    draws = np.array([np.interp((np.arange(4000) + 0.5) / 4000, _LEVELS, row) for row in forecast.lengths])
    found = forecast.survival(np.array([tokens]))[:, 0]
    # Where several answers of one length are likely, "longer" and "as long" differ.
    assert (found >= (draws > tokens + 1e-6).mean(axis=1) - 1e-3).all()
    assert (found <= (draws > tokens - 1e-6).mean(axis=1) + 1e-3).all()
    assert forecast.mean == pytest.approx(draws.mean(axis=1), rel=1e-3)


@given(_FORECASTS, st.floats(0, 900))
def test_what_remains_is_what_sampling_finds(forecast: LengthForecast, there: float) -> None:
    prompt_tokens = 7.0
    remaining = forecast.remaining(np.full(len(forecast), there), prompt_tokens, exceeded_with=0.2)
    draws = [np.interp((np.arange(20_000) + 0.5) / 20_000, _LEVELS, row) for row in forecast.lengths]
    for index, lengths in enumerate(draws):
        left = lengths[lengths > there] - there
        if len(left) < 200 or np.ptp(left) < 1:
            continue
        assert remaining.mean[index] == pytest.approx(left.mean(), rel=0.05, abs=1.0)
        held = (left * (there + prompt_tokens) + left**2 / 2).mean()
        assert remaining.held[index] == pytest.approx(held, rel=0.1, abs=20.0)


def test_an_answer_that_is_longer_than_was_held_possible_goes_on_for_a_while() -> None:
    remaining = LengthForecast.exact([100.0]).remaining(np.array([400.0]))
    assert remaining.mean == pytest.approx([20.0])
    assert remaining.risk > remaining.mean


@given(_FORECASTS, st.floats(0, 1000))
def test_the_table_is_nearly_exact(forecast: LengthForecast, tokens: float) -> None:
    near = forecast.column_tokens
    found = forecast.chance(np.arange(len(forecast)), np.full(len(forecast), tokens))
    low, high = forecast.survival(np.array([tokens + near, tokens - near])).T
    assert ((low - 1e-4 <= found) & (found <= high + 1e-4)).all()


@pytest.mark.parametrize(
    ("lengths", "levels", "message"),
    [
        ([[2.0, 1.0]], (0.0, 1.0), "ascend"),
        ([[1.0, 2.0]], (0.1, 1.0), "from 0 to 1"),
        ([[1.0, 2.0, 3.0]], (0.0, 1.0), "2 levels"),
    ],
)
def test_a_forecast_that_makes_no_sense_is_refused(
    lengths: list[list[float]], levels: tuple[float, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LengthForecast(np.array(lengths), levels)
