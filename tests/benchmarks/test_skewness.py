"""The benchmark measures what it says: a bound that holds, estimates as wrong as they should be, all policies."""

import numpy as np
import pytest

from benchmarks.paper_workload import draw_lengths, log_normal_error, overlooked_tail
from benchmarks.skewness import ESTIMATES, OURS, POLICIES, Setup, play, setups, summarise
from streamrl.planning.forecast import Array


def recall(lengths: Array, estimates: Array) -> float:
    count = len(lengths) // 5
    return len(set(np.argsort(-lengths)[:count]) & set(np.argsort(-estimates)[:count])) / count


def test_lengths_are_the_papers() -> None:
    lengths = draw_lengths(100_000, np.random.default_rng(0))
    quantiles = np.quantile(lengths, [0.1, 0.5, 0.75, 0.9, 0.99])
    assert quantiles == pytest.approx([1360, 3241, 5959, 13063, 19195], rel=0.02)
    assert lengths.mean() == pytest.approx(4991, rel=0.02)


def test_estimates_find_as_much_of_the_longest_fifth_as_they_should() -> None:
    generator = np.random.default_rng(1)
    lengths = draw_lengths(20_000, generator)
    for estimate in (log_normal_error, overlooked_tail):
        assert recall(lengths, estimate(lengths, generator)[0]) == pytest.approx(0.87, abs=0.01)


def test_forecasts_of_wrong_estimates_are_right_on_the_whole() -> None:
    generator = np.random.default_rng(2)
    lengths = draw_lengths(5000, generator)
    for estimate in (log_normal_error, overlooked_tail):
        _, forecast = estimate(lengths, generator)
        assert forecast.mean.sum() == pytest.approx(lengths.sum(), rel=0.03)
    _, forecast = log_normal_error(lengths, generator)
    longer = forecast.survival(lengths[:, None].astype(float))[:, 0]
    for share in (0.1, 0.5, 0.9):
        assert (longer < share).mean() == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("held_token_s", [0.0, 2e-8])
def test_nothing_is_faster_than_the_bound(held_token_s: float) -> None:
    setup = Setup(held_token_s, num_instances=4, batch_limit=8, num_prompts=64)
    rows = [play(setup, seed) for seed in range(2)]
    for row in rows:
        assert min(row.values()) >= row["", "bound"] * (1 - 1e-6)
    assert play(setup, 0) == rows[0]
    cells = {cell.name: cell for cell in summarise({setup: rows}).cells}
    for estimate in ESTIMATES:
        assert {f"{estimate}/{policy}/{setup.name}" for policy in POLICIES} <= set(cells)
    assert cells[f"g/true_lengths/{OURS}/{setup.regime}"].goal == 0.8


def test_there_is_a_cell_for_each_fleet_and_batch() -> None:
    found = list(setups())
    assert len(found) == len({setup.name for setup in found}) == 2 * 27
