"""Colocated, sync and async on one workload: samples a second against colocated, and who is idle.

On emulated devices (benchmarks/emulation): a 7B model on 32 devices, 16 generators, batches of 1,024 answers, the
paper's three sets of lengths. Services, broker and gRPC are real, and each generator is a process; the engine's steps
and the trainer's passes take the paper's times (Fig 6, Fig 2, Fig 8) on a clock that runs up to 20 times as fast, on
which all that our services take weighs as many times as much. Colocated has all devices for each stage, the others
split them as is best for each. Dispatch is the same in all. `T_gen` is measured, with a trainer that takes no time.

Beside them stand ways to do it that are not ours: training on mini-batches of a quarter of the batch, and one-step
async, in which all instances change their weights at one barrier.

With real compute (benchmarks/real_run.py) vLLM and DeepSpeed share the cores that there are: the laptop example, whose
answers have a long tail by themselves. Colocated gives the trainer all cores in its turn. Three quarters of an hour.
"""

import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil

from benchmarks.emulation.devices import NUM_DEVICES, best_split, scaled_s
from benchmarks.emulation.fleet import WARM_UP_ITERATIONS, SteadyState, run_emulated
from benchmarks.emulation.plan import Emulation
from benchmarks.emulation.stages import (
    BATCH_SIZE,
    LENGTH_SETS,
    LONGEST_ANSWER,
    MAX_RUNNING,
    NUM_INSTANCES,
    PROFILE_DEVICES,
    Stages,
)
from benchmarks.real_run import real_run
from benchmarks.result import Cell, Result

logger = logging.getLogger(__name__)

MEASURED_ITERATIONS = 4
LOAD_S = 1.0
"""For which an instance stands still to load 15 GB that its host has fetched, at PCIe's 16 GB/s."""
SYNC_GOAL, ASYNC_GOAL, REAL_GOAL = 1.05, 1.2, 0.95
IDLE_LIMIT, BOUND_LIMIT = 0.05, 1.05
STREAMED_SHARE, MINI_BATCH_SHARE, WHOLE_BATCH_SHARE = 1 / 32, 1 / 4, 8.0
REAL_CONFIG = Path("examples/laptop.toml")
REAL_ROUNDS = 2
REAL_SETTINGS: dict[str, Any] = {"trainer.num_iterations": 20, "eval.every": 0, "eval.num_prompts": 64}
REAL_MODES: dict[str, dict[str, Any]] = {
    "colocated": {"generator.num_threads": 1, "trainer.num_threads": 2},
    "sync": {},
    "async": {},
}
IN_FLIGHT = {"pipeline.mode": "async", "weights.swap": "in_flight"}
AT_BOUNDARIES = {"pipeline.mode": "async", "weights.swap": "boundary"}


def measure() -> Result:
    """Everything, one after the other."""
    result = Result(
        "throughput",
        {
            "emulated": {
                "devices": NUM_DEVICES,
                "generators": NUM_INSTANCES,
                "batch": BATCH_SIZE,
                "max_running": MAX_RUNNING,
                "iterations": [WARM_UP_ITERATIONS, MEASURED_ITERATIONS],
                "load_s": LOAD_S,
                "sets": [asdict(lengths) for lengths in LENGTH_SETS],
            },
            "real": {"config": str(REAL_CONFIG), "rounds": REAL_ROUNDS, "settings": REAL_SETTINGS, "modes": REAL_MODES},
        },
    )
    for lengths in LENGTH_SETS:
        result.cells += emulated_cells(Stages(lengths))
    result.cells += real_cells()
    return result


def emulated_cells(stages: Stages) -> list[Cell]:
    """All modes on one set of lengths."""
    colocated = _run(stages, {"pipeline.mode": "colocated"}, (NUM_DEVICES, NUM_DEVICES), WHOLE_BATCH_SHARE)
    cells = _cells(stages, "colocated", (NUM_DEVICES, NUM_DEVICES), colocated, None)

    split = stages.sync_split()
    sync = _run(stages, {"pipeline.mode": "sync"}, split, STREAMED_SHARE)
    cells += _cells(stages, "sync", split, sync, colocated, SYNC_GOAL)
    mini_batches = _run(stages, {"pipeline.mode": "sync"}, split, MINI_BATCH_SHARE)
    cells += _cells(stages, "sync_mini_batches", split, mini_batches, colocated)

    for name, settings, goal in (("async", IN_FLIGHT, ASYNC_GOAL), ("async_at_boundaries", AT_BOUNDARIES, None)):
        alone = _run(stages, settings, (PROFILE_DEVICES, NUM_DEVICES), STREAMED_SHARE, trains=False).iteration_s
        split = _async_split(stages, alone)
        asynchronous = _run(stages, settings, split, STREAMED_SHARE)
        cells += _cells(stages, name, split, asynchronous, colocated, goal)
        generation_s = _generation_s(alone, split[0])
        bound_s = max(generation_s, asynchronous.train_s)
        prefix = f"{stages.lengths.name}/{name}"
        cells += [
            Cell(f"{prefix}/T_gen", generation_s, "s"),
            Cell(f"{prefix}/T_train", asynchronous.train_s, "s"),
            Cell.limited(
                f"{prefix}/over_bound", asynchronous.iteration_s / bound_s, "of max(T_gen, T_train)", limit=BOUND_LIMIT
            ),
            Cell.limited(f"{prefix}/trainer_idle_limit", asynchronous.trainer_idle, "of the time", limit=IDLE_LIMIT),
        ]

    split = _async_split(stages, stages.generation_s(PROFILE_DEVICES))
    one_step = _run(stages, AT_BOUNDARIES, split, WHOLE_BATCH_SHARE, global_barrier=True)
    cells += _cells(stages, "one_step_async", split, one_step, colocated)
    return cells


def real_cells() -> list[Cell]:
    """All modes, in turn, so that a busy machine slows each."""
    rounds = [
        {
            mode: real_run(REAL_CONFIG, {"pipeline.mode": mode, **REAL_SETTINGS, **settings})
            for mode, settings in REAL_MODES.items()
        }
        for _ in range(REAL_ROUNDS)
    ]
    cells = []
    for mode in REAL_MODES:
        runs = [of_round[mode] for of_round in rounds]
        rate = fmean(run.samples_per_s for run in runs)
        peer = fmean(of_round["colocated"].samples_per_s for of_round in rounds)
        name = f"real/{mode}"
        cells += [
            Cell(name, rate, "samples/s")
            if mode == "colocated"
            else Cell.compared(name, rate, "samples/s", against="colocated", peer=peer, goal=REAL_GOAL),
            Cell(f"{name}/tokens", fmean(run.tokens_per_s for run in runs), "tokens/s"),
            Cell(f"{name}/idle/trainer", fmean(run.trainer_idle for run in runs), "of the time"),
            Cell(f"{name}/idle/generator", fmean(run.generator_idle for run in runs), "of the time"),
            Cell(f"{name}/busy_cores", fmean(run.busy_cores for run in runs), f"of {psutil.cpu_count()} cores"),
        ]
    return cells


def _async_split(stages: Stages, generation_alone_s: float) -> tuple[int, int]:
    """Both stages go on at once: the slower one counts."""
    return best_split(
        lambda generating, training: max(_generation_s(generation_alone_s, generating), stages.training_s(training))
    )


def _generation_s(alone_s: float, devices: int) -> float:
    return scaled_s("generation", alone_s, measured_on=PROFILE_DEVICES, devices=devices)


def _run(
    stages: Stages,
    settings: Mapping[str, Any],
    split: tuple[int, int],
    saturation_share: float,
    *,
    trains: bool = True,
    global_barrier: bool = False,
) -> SteadyState:
    generating, training = split
    emulation = Emulation(
        speed=stages.lengths.speed,
        longest_answer=LONGEST_ANSWER,
        max_running=MAX_RUNNING,
        step_ms=stages.step_ms(generating),
        prefill_token_ms=stages.prefill_token_ms(generating),
        load_s=LOAD_S,
        train_token_s=stages.train_token_s(training) if trains else 0.0,
        global_barrier=global_barrier,
    )
    saturation_tokens = round(saturation_share * BATCH_SIZE * stages.mean_tokens)
    state = run_emulated(
        emulation,
        WARM_UP_ITERATIONS + MEASURED_ITERATIONS,
        {**settings, "trainer.saturation_tokens": saturation_tokens},
    )
    logger.info("%s %s %s: %s", stages.lengths.name, settings, split, state)
    return state


def _cells(
    stages: Stages,
    mode: str,
    split: tuple[int, int],
    state: SteadyState,
    colocated: SteadyState | None,
    goal: float | None = None,
) -> list[Cell]:
    name, rate = f"{stages.lengths.name}/{mode}", state.samples_per_s
    unit = f"samples/s on {split[0]}+{split[1]} devices"
    if colocated is None:
        first = Cell(name, rate, unit)
    elif goal is None:
        first = Cell(name, rate, unit, "colocated", rate / colocated.samples_per_s)
    else:
        first = Cell.compared(name, rate, unit, against="colocated", peer=colocated.samples_per_s, goal=goal)
    return [
        first,
        Cell(f"{name}/iteration", state.iteration_s, "s"),
        Cell(f"{name}/idle/trainer", state.trainer_idle, "of the time"),
        Cell(f"{name}/idle/generator", state.generator_idle, "of the time"),
        Cell(f"{name}/staleness_max", state.staleness_max, "versions"),
        Cell(f"{name}/busy_cores", state.busy_cores, f"of {psutil.cpu_count()} cores"),
        Cell(f"{name}/instance", state.instance_mib, "MiB a generator"),
    ]
