"""Whole runs of the laptop example against round-robin: how long generation takes, and how long the trainer waits.

In mode sync, where a batch's last answer is waited for: in async an instance that is done early has the next batch to
go on with. 32 groups of 8 answers go to two instances of 64 places: two waves, which round-robin, longest first, nearly
balances. Runs of one seed have the same prompts, batch by batch. Round-robin stands as it is dispatched: nothing moves.

On emulated devices (benchmarks/emulation) each instance and the trainer have one of their own. Services, broker, gRPC
and the length ranker are real; steps of the engine take as long as those of the laptop's engine alone on a core, passes
of the trainer as long as its own there, and answers are as long as right ones. Both runs of a seed go on beside each
other, at half the speed, for an epoch, in which lengths are learned, and one and a half more, whose prompts were
answered before.

With real compute two engines and a trainer share the threads of the machine: what one leaves idle others use, so that
dispatch can change little. There the two runs of a seed take turns, a batch each (benchmarks/turns.py), for an epoch.

Batch is compared with batch, over all seeds. Each finished pair of runs is kept in `runs/laptop_dispatch`, and is not
done again; remove the folder to begin anew. An hour.
"""

import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.curves.perform import logged_figures, run_whole
from benchmarks.emulation.fleet import Nursery, run_services
from benchmarks.emulation.plan import Emulation, prompt_key
from benchmarks.length_ranker import laptop_prompts
from benchmarks.result import Cell, Result
from benchmarks.turns import in_turns
from streamrl.command.resolve import resolve
from streamrl.planning.forecast import Array
from streamrl.run_folder import RunFolder
from streamrl.whole_file import replace_file

logger = logging.getLogger(__name__)

NUM_SEEDS = 5
WARM_UP_ITERATIONS = 2
"""Of each run: nothing is known of lengths yet, and engines do everything for the first time."""
CONFIDENCE = 0.95
POLICIES: dict[str, dict[str, Any]] = {
    "makespan": {},
    "round_robin": {"scheduler.dispatch": "round_robin", "scheduler.moves": "none"},
}
STEP_MS, PREFILL_TOKEN_MS = {1: 2.1, 4: 2.6, 16: 3.5, 64: 6.2}, 0.047
"""By `streamrl profile examples/laptop.toml --set generator.profile_s=10`, medians of eight."""
TRAIN_TOKEN_S = 4e-5
"""In mode colocated, where the trainer has the machine to itself: time/train_s over the tokens of a batch."""
LOAD_S = 0.02
SPEED = 0.5
"""Emulated seconds in a real one: what the services of two runs need of the machine's cores weighs half as much so."""
EPOCH_ITERATIONS = 64
_CONFIG = Path("examples/laptop.toml")
_SETTINGS: dict[str, Any] = {"pipeline.mode": "sync", "eval.every": 0}
_EMULATED: dict[str, Any] = {
    "trainer.num_iterations": EPOCH_ITERATIONS * 5 // 2,
    "generator.engine": "fake",
    "trainer.checkpoint_every": 0,
    # Otherwise answers of equal rewards need no pass.
    "trainer.kl": "loss",
    "eval.num_prompts": 1,
}
_REAL: dict[str, Any] = {"trainer.num_iterations": EPOCH_ITERATIONS, "eval.num_prompts": 64}
_FIGURES = ("time/generation_s", "time/wait_s", "time/iteration_s", "length/mean")
_KEPT = Path("runs") / "laptop_dispatch"


@dataclass(frozen=True)
class DispatchRun:
    """What is kept of a run: by iteration, after the warm-up."""

    setup: Mapping[str, str]
    """What it was done with."""
    generation_s: Sequence[float]
    idle: Sequence[float]
    """Share of the iteration that the trainer waited."""
    length_mean: Sequence[float]
    """Tokens."""


def measure() -> Result:
    """All runs, as far as they are not kept."""
    with closing(Nursery()) as nursery:
        emulated = _by_policy(partial(_emulated_runs, nursery))
    real = _by_policy(_real_runs)
    emulation = _emulation({}).model_dump(exclude={"answer_tokens", "longest_answer"})
    settings = {"num_seeds": NUM_SEEDS, **_SETTINGS, "policies": POLICIES, "emulated": _EMULATED, "real": _REAL}
    found = [
        *cells("emulated/all", emulated),
        *cells("emulated/first_epoch", _stretch(emulated, 0, EPOCH_ITERATIONS - WARM_UP_ITERATIONS)),
        *cells("emulated/later_epochs", _stretch(emulated, EPOCH_ITERATIONS - WARM_UP_ITERATIONS, None)),
        *cells("real", real),
    ]
    return Result("laptop_dispatch", settings | {"emulation": emulation}, found)


def _by_policy(pair: Callable[[int], Mapping[str, DispatchRun]]) -> dict[str, list[DispatchRun]]:
    """The runs of all seeds.

    Args:
        pair: those of one seed.
    """
    pairs = [pair(seed) for seed in range(NUM_SEEDS)]
    return {policy: [of_seed[policy] for of_seed in pairs] for policy in POLICIES}


def _stretch(runs: Mapping[str, Sequence[DispatchRun]], first: int, end: int | None) -> dict[str, list[DispatchRun]]:
    """Of each run some batches."""
    return {
        policy: [
            DispatchRun(run.setup, run.generation_s[first:end], run.idle[first:end], run.length_mean[first:end])
            for run in of_policy
        ]
        for policy, of_policy in runs.items()
    }


def cells(world: str, runs: Mapping[str, Sequence[DispatchRun]]) -> list[Cell]:
    """From the runs of each policy, by seed, to what is reported."""
    found = []
    ours, theirs = (_by_seed(runs[policy], "generation_s") for policy in ("makespan", "round_robin"))
    ratio = float(ours.mean() / theirs.mean())
    found.append(Cell(f"{world}/round_robin/generation", float(theirs.mean()), "s a batch"))
    found.append(Cell(f"{world}/makespan/generation", float(ours.mean()), "s a batch", "round_robin", ratio))
    found += _difference_cells(f"{world}/generation", (ours - theirs) / theirs.mean(), "of round_robin's mean")
    ours, theirs = (_by_seed(runs[policy], "idle") for policy in ("makespan", "round_robin"))
    found.append(Cell(f"{world}/round_robin/idle/trainer", float(theirs.mean()), "of the time"))
    found.append(Cell(f"{world}/makespan/idle/trainer", float(ours.mean()), "of the time"))
    found += _difference_cells(f"{world}/idle/trainer", ours - theirs, "of the time")
    ours, theirs = (_by_seed(runs[policy], "length_mean") for policy in ("makespan", "round_robin"))
    ratio = float(ours.mean() / theirs.mean())
    found.append(Cell(f"{world}/lengths", float(ours.mean()), "tokens", "round_robin", ratio))
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
        found.append(Cell(f"{name}/difference/{way}", mean, told, "round_robin", None, 0.0, mean + half_width < 0))
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


def _emulated_runs(nursery: Nursery, seed: int) -> Mapping[str, DispatchRun]:
    emulation = _emulation({prompt_key(one.example.token_ids): one.example.lengths[0] for one in laptop_prompts(seed)})
    told = {"emulation": emulation.model_dump_json(exclude={"answer_tokens"})}

    def do(planned: Sequence[_Planned]) -> list[Mapping[str, Any]]:
        def one(run: _Planned) -> Mapping[str, Any]:
            settings = resolve(_CONFIG, [*run.assignments, f"run.dir={run.folder}", "run.id=emulated"])
            return run_services(nursery, emulation, settings).summary

        with ThreadPoolExecutor(len(planned)) as threads:
            return list(threads.map(one, planned))

    return _kept_or_done("emulated", seed, _EMULATED, told, do, SPEED)


def _emulation(answer_tokens: dict[str, int]) -> Emulation:
    return Emulation(
        speed=SPEED,
        longest_answer=max(answer_tokens.values(), default=0),
        max_running=64,
        step_ms=STEP_MS,
        prefill_token_ms=PREFILL_TOKEN_MS,
        load_s=LOAD_S,
        train_token_s=TRAIN_TOKEN_S,
        answer_tokens=answer_tokens,
    )


def _real_runs(seed: int) -> Mapping[str, DispatchRun]:
    def do(planned: Sequence[_Planned]) -> list[Mapping[str, Any]]:
        return in_turns([(RunFolder(run.folder / run.name), partial(one, run)) for run in planned])

    def one(run: _Planned) -> Mapping[str, Any]:
        return run_whole(run.name, _CONFIG, run.assignments, run.folder, log=run.folder / "progress.log")

    return _kept_or_done("real", seed, _REAL, {}, do)


@dataclass(frozen=True)
class _Planned:
    """A run to be done."""

    name: str
    setup: Mapping[str, str]
    folder: Path
    """Is there, empty, and stays if the run fails."""
    assignments: Sequence[str]


def _kept_or_done(
    world: str,
    seed: int,
    world_settings: Mapping[str, Any],
    told: Mapping[str, str],
    do: Callable[[Sequence[_Planned]], Sequence[Mapping[str, Any]]],
    speed: float = 1.0,
) -> dict[str, DispatchRun]:
    """The pair of a seed, by policy.

    Args:
        told: what else the runs are done with.
        do: does them, and returns their summaries.
        speed: seconds that count in a real one.
    """
    planned = {}
    for policy, of_policy in POLICIES.items():
        values = {"run.seed": seed, **_SETTINGS, **world_settings, **of_policy}
        setup = {name: str(value) for name, value in values.items()}
        name = f"{world}-{policy}-{seed}"
        assignments = [f"{key}={value}" for key, value in setup.items()]
        planned[policy] = _Planned(name, {**setup, **told}, (_KEPT / name).absolute(), assignments)
    kept = {policy: run for policy, one in planned.items() if (run := _kept(one)) is not None}
    if len(kept) == len(planned):
        return kept
    for one in planned.values():
        shutil.rmtree(one.folder, ignore_errors=True)
        one.folder.mkdir(parents=True)
    summaries = do(list(planned.values()))
    return {
        policy: _keep(one, summary["mlflow"], speed)
        for (policy, one), summary in zip(planned.items(), summaries, strict=True)
    }


def _kept(planned: _Planned) -> DispatchRun | None:
    file = planned.folder.with_suffix(".json")
    if not file.is_file():
        return None
    kept = DispatchRun(**json.loads(file.read_text()))
    return kept if kept.setup == planned.setup else None


def _keep(planned: _Planned, tracker: Mapping[str, str], speed: float) -> DispatchRun:
    figures = logged_figures(tracker["tracking_uri"], tracker["run_id"], _FIGURES)
    generation_s, wait_s, iteration_s, length_mean = (
        list(figures[figure].values)[WARM_UP_ITERATIONS:] for figure in _FIGURES
    )
    generation_s = [speed * seconds for seconds in generation_s]
    shutil.rmtree(planned.folder)
    logger.info("%s: %.2f s a batch", planned.name, np.mean(generation_s))
    idle = [wait / whole for wait, whole in zip(wait_s, iteration_s, strict=True)]
    done = DispatchRun(planned.setup, generation_s, idle, length_mean)
    replace_file(planned.folder.with_suffix(".json"), json.dumps(asdict(done)), flush=True)
    return done
