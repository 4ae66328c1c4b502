"""Learning curves: runs are done once and kept, differences are judged by what seeds do, the page is of kept data."""

import dataclasses
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom

from benchmarks.curves.__main__ import DATA, DOCS, do_missing, kept_runs, missing
from benchmarks.curves.compare import binomial_quantile, compare
from benchmarks.curves.kept_run import FIGURES, KeptRun, Series, load, path_of, save
from benchmarks.curves.page import page
from benchmarks.curves.perform import RunFailedError, settings_of
from benchmarks.curves.plots import draw
from benchmarks.curves.studies import STUDIES, PlannedRun, planned_runs
from trainer_svc.figures import FIGURES as ALL_FIGURES

NUM_POINTS = 30
SHOWN = ("reward/mean", "eval/accuracy", "staleness/mean")


def _draws(seed: int, num_seeds: int = 5, *, lower: float = 0.0) -> np.ndarray:
    """Curves that rise, and scatter by 0.05 about what each seed comes to."""
    random = np.random.default_rng(seed)
    rise = 1 - np.exp(-np.arange(NUM_POINTS) / 5)
    return rise - lower + random.normal(0, 0.05, (num_seeds, NUM_POINTS))


def _run(planned: PlannedRun) -> KeptRun:
    values = _draws(zlib.crc32(planned.name.encode()), 1)[0].tolist()
    return KeptRun(
        name=planned.name,
        config=planned.config,
        assignments=list(planned.assignments),
        ended_at="2026-01-01T00:00:00+00:00",
        versions={"torch": "2"},
        settings=settings_of(planned),
        summary={"staleness_max": 1},
        figures={name: Series(list(range(NUM_POINTS)), values) for name in SHOWN},
    )


def test_curves_of_equal_arms_coincide_and_those_of_others_do_not() -> None:
    equal = [compare(_draws(seed), _draws(1000 + seed)).coincide for seed in range(200)]
    # Five in a hundred differ as a whole, and one in a hundred point by point.
    assert 0.90 <= np.mean(equal) <= 0.98
    assert not any(compare(_draws(seed), _draws(1000 + seed, lower=0.05)).coincide for seed in range(50))


def test_a_difference_in_few_points_is_a_difference() -> None:
    first, second = _draws(1), _draws(2)
    second[:, :5] += 0.5
    second[:, 5:10] -= 0.5
    comparison = compare(first, second)
    assert comparison.num_outside > comparison.num_allowed_outside
    assert abs(comparison.mean_difference) < comparison.mean_half_width
    assert not comparison.coincide


def test_spread_and_interval_are_those_of_students_t() -> None:
    comparison = compare([[0.0], [2.0]], [[3.0], [5.0]])
    assert comparison.difference == pytest.approx([3.0])
    assert comparison.spread == pytest.approx([2**0.5])
    # t(0.975, 2 degrees of freedom) = 4.3027, standard error sqrt(2).
    assert comparison.half_width == pytest.approx([4.3027 * 2**0.5], rel=1e-4)
    assert comparison.num_within_spread == 0
    assert comparison.num_outside == 0


def test_curves_without_any_spread_coincide_with_themselves() -> None:
    assert compare([[1.0, 0.5]] * 3, [[1.0, 0.5]] * 3).coincide


def test_binomial_quantiles_are_those_of_scipy() -> None:
    for num_trials in (1, 7, 30):
        for probability in (0.5, 0.95, 0.99):
            assert binomial_quantile(probability, num_trials, 0.05) == binom.ppf(probability, num_trials, 0.05)


def test_every_planned_run_has_one_name_one_recipe_and_settings_that_are_valid() -> None:
    by_name: dict[str, PlannedRun] = {}
    for study in STUDIES:
        for arm in study.arms:
            for planned in study.runs_of(arm):
                assert by_name.setdefault(planned.name, planned) == planned
    assert sorted(by_name) == sorted(planned.name for planned in planned_runs())
    for planned in by_name.values():
        settings_of(planned)


def test_figures_of_curves_are_figures_of_the_trainer() -> None:
    assert set(FIGURES) <= {figure.name for figure in ALL_FIGURES}


def test_a_run_is_kept_as_it_was(tmp_path: Path) -> None:
    run = _run(next(planned_runs()))
    save(path_of(tmp_path / "data", run.name), run)
    assert load(path_of(tmp_path / "data", run.name)) == run
    assert load(path_of(tmp_path / "data", "another")) is None


def test_only_what_is_missing_or_has_another_recipe_is_run(tmp_path: Path) -> None:
    done: list[str] = []

    def perform(planned: PlannedRun) -> KeptRun:
        done.append(planned.name)
        if planned.name == "laptop-sync-1" and done.count(planned.name) == 1:
            raise RunFailedError("died")
        return _run(planned)

    assert do_missing(tmp_path, ["laptop-sync"], 2, perform) == 1
    assert done == ["laptop-sync-0", "laptop-sync-1"]
    assert do_missing(tmp_path, ["laptop-sync"], None, perform) == 0
    assert done[2:] == [f"laptop-sync-{seed}" for seed in (1, 2, 3, 4)]
    assert list(missing(tmp_path, ["laptop-sync"])) == []
    done.clear()
    run = load(path_of(tmp_path, "laptop-sync-2"))
    assert run is not None
    changed = {**run.settings, "trainer": {**run.settings["trainer"], "learning_rate": 0.5}}
    save(path_of(tmp_path, run.name), dataclasses.replace(run, settings=changed))
    other = load(path_of(tmp_path, "laptop-sync-3"))
    assert other is not None
    save(path_of(tmp_path, other.name), dataclasses.replace(other, assignments=["run.seed=3"]))
    without = {**run.settings, "trainer": {k: v for k, v in run.settings["trainer"].items() if k != "betas"}}
    save(path_of(tmp_path, "laptop-sync-0"), dataclasses.replace(_run(next(planned_runs())), settings=without))
    assert do_missing(tmp_path, ["laptop-sync"], None, perform) == 0
    assert done == ["laptop-sync-2", "laptop-sync-3"]


def test_the_page_judges_by_what_is_kept(tmp_path: Path) -> None:
    assert "0 of 10 runs" in page(STUDIES, kept_runs(tmp_path))
    for planned in planned_runs():
        if planned.name.startswith("laptop-"):
            run = _run(planned)
            save(path_of(tmp_path, run.name), run)
    kept = kept_runs(tmp_path)
    text = page(STUDIES, kept)
    assert "10 of 10 runs" in text
    assert "8 of 8 algorithms that were run end at 0.85 or more." in text
    assert "Rewards: coincide within the spread of the seeds. Mean difference" in text
    assert text.count("<details>") == 1
    draw(tmp_path / "laptop.svg", kept["laptop"])
    first = (tmp_path / "laptop.svg").read_bytes()
    draw(tmp_path / "laptop.svg", kept["laptop"])
    assert (tmp_path / "laptop.svg").read_bytes() == first
    assert b"async, one version old (5 seeds)" in first


def test_the_page_in_docs_is_of_the_data_in_docs() -> None:
    assert (DOCS / "curves.md").read_text() == page(STUDIES, kept_runs(DATA)), "run `make curves-page`"


def test_what_is_kept_names_no_folder_of_a_machine() -> None:
    for path in DATA.glob("*.json"):
        assert not re.search(r'"/[a-z]|[a-z]+:///|127\.0\.0\.1', path.read_text()), path
