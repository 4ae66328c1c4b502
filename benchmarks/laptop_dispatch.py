"""Whole runs of the laptop example with the default dispatch and with round-robin: how long generation takes, and how
long the trainer waits for it.

In mode sync, where a batch's last answer is waited for: in async an instance that is done early has the next batch to
go on with. Runs of one seed have the same prompts, batch by batch; which policy goes first changes from seed to seed.
The example deals 32 groups of 8 answers to two instances of 64 places: two waves, which round-robin, longest first,
nearly balances. Little is left to gain: two or three per cent in a simulation, a third of what batches differ by. So
batch is compared with batch, over all seeds. Round-robin stands as it is dispatched: nothing moves.

Each finished run is kept in `runs/laptop_dispatch`, and is not done again; remove the folder to begin anew. A quarter
of an hour.
"""

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.curves.perform import logged_figures, run_whole
from benchmarks.result import Cell, Result
from streamrl.planning.forecast import Array
from streamrl.whole_file import replace_file

logger = logging.getLogger(__name__)

NUM_SEEDS = 5
NUM_ITERATIONS = 20
WARM_UP_ITERATIONS = 2
"""Of each run: nothing is known of lengths yet, and engines do everything for the first time."""
CONFIDENCE = 0.95
POLICIES: dict[str, dict[str, Any]] = {
    "makespan": {},
    "round_robin": {"scheduler.dispatch": "round_robin", "scheduler.moves": "none"},
}
_CONFIG = Path("examples/laptop.toml")
_SETTINGS: dict[str, Any] = {"pipeline.mode": "sync", "eval.every": 0, "eval.num_prompts": 64}
_FIGURES = ("time/generation_s", "time/wait_s", "time/iteration_s", "length/mean")
_KEPT = Path("runs") / "laptop_dispatch"


@dataclass(frozen=True)
class DispatchRun:
    """What is kept of a run: by iteration, after the warm-up."""

    assignments: Mapping[str, str]
    generation_s: Sequence[float]
    idle: Sequence[float]
    """Share of the iteration that the trainer waited."""
    length_mean: Sequence[float]
    """Tokens."""


def measure() -> Result:
    """All seeds, as far as they are not kept."""
    runs: dict[str, list[DispatchRun]] = {policy: [] for policy in POLICIES}
    for seed in range(NUM_SEEDS):
        for policy in list(POLICIES)[:: -1 if seed % 2 else 1]:
            runs[policy].append(_kept_or_done(policy, seed))
    settings = {"num_seeds": NUM_SEEDS, "num_iterations": NUM_ITERATIONS, **_SETTINGS, "policies": POLICIES}
    return Result("laptop_dispatch", settings, cells(runs))


def cells(runs: Mapping[str, Sequence[DispatchRun]]) -> list[Cell]:
    """From the runs of each policy, by seed, to what is reported."""
    found = []
    ours, theirs = (_by_seed(runs[policy], "generation_s") for policy in ("makespan", "round_robin"))
    ratio = float(ours.mean() / theirs.mean())
    found.append(Cell("round_robin/generation", float(theirs.mean()), "s a batch"))
    found.append(Cell("makespan/generation", float(ours.mean()), "s a batch", "round_robin", ratio))
    found += _difference_cells("generation", (ours - theirs) / theirs.mean(), "of round_robin's mean")
    ours, theirs = (_by_seed(runs[policy], "idle") for policy in ("makespan", "round_robin"))
    found.append(Cell("round_robin/idle/trainer", float(theirs.mean()), "of the time"))
    found.append(Cell("makespan/idle/trainer", float(ours.mean()), "of the time"))
    found += _difference_cells("idle/trainer", ours - theirs, "of the time")
    ours, theirs = (_by_seed(runs[policy], "length_mean") for policy in ("makespan", "round_robin"))
    found.append(Cell("lengths", float(ours.mean()), "tokens", "round_robin", float(ours.mean() / theirs.mean())))
    return found


def _difference_cells(name: str, differences: Array, unit: str) -> list[Cell]:
    """Of (seeds, batches) paired differences: the mean and its interval, once from the seeds' means and once from all
    batches, taken as independent. Met: less than round-robin, whatever chance does."""
    wholes = {"by_seed": differences.mean(axis=1), "by_batch": differences.ravel()}
    found = []
    for way, values in wholes.items():
        mean, half_width = interval(values)
        told = (
            f"{unit}, {CONFIDENCE:.0%} interval {mean - half_width:+.4f} to {mean + half_width:+.4f}, n {len(values)}"
        )
        found.append(Cell(f"difference/{name}/{way}", mean, told, "round_robin", None, 0.0, mean + half_width < 0))
    return found


def interval(values: Array) -> tuple[float, float]:
    """The mean, and half the width of its interval (Student's t).

    Args:
        values: two or more.
    """
    from scipy.stats import t

    quantile = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    return float(values.mean()), quantile * float(values.std(ddof=1)) / len(values) ** 0.5


def _by_seed(runs: Sequence[DispatchRun], name: str) -> Array:
    """(seeds, batches)"""
    return np.array([getattr(run, name) for run in runs], dtype=np.float64)


def _kept_or_done(policy: str, seed: int) -> DispatchRun:
    values = {"run.seed": seed, "trainer.num_iterations": NUM_ITERATIONS, **_SETTINGS, **POLICIES[policy]}
    assignments = {name: str(value) for name, value in values.items()}
    name = f"{policy}-{seed}"
    file = _KEPT / f"{name}.json"
    if file.is_file():
        kept = DispatchRun(**json.loads(file.read_text()))
        if kept.assignments == assignments:
            return kept
    done = _do(name, assignments)
    replace_file(file, json.dumps(asdict(done)), flush=True)
    return done


def _do(name: str, assignments: Mapping[str, str]) -> DispatchRun:
    """One run, as a user starts it.

    Raises:
        RunFailedError: it failed; its folder stays.
    """
    folder = (_KEPT / name).absolute()
    shutil.rmtree(folder, ignore_errors=True)
    settings = [f"{setting}={value}" for setting, value in assignments.items()]
    summary = run_whole(name, _CONFIG, settings, folder, log=folder / "progress.log")
    figures = logged_figures(summary["mlflow"]["tracking_uri"], summary["mlflow"]["run_id"], _FIGURES)
    generation_s, wait_s, iteration_s, length_mean = (
        list(figures[figure].values)[WARM_UP_ITERATIONS:] for figure in _FIGURES
    )
    shutil.rmtree(folder)
    logger.info("%s: %.2f s a batch", name, np.mean(generation_s))
    idle = [wait / whole for wait, whole in zip(wait_s, iteration_s, strict=True)]
    return DispatchRun(assignments, generation_s, idle, length_mean)
