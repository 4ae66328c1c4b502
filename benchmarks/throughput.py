"""Colocated, sync and async on one workload: samples a second against colocated, and who is idle.

On emulated devices (benchmarks/emulation): a 7B model on 32 devices, 16 generators, batches of 1,024 answers to 512
prompts, the paper's lengths with three maxima. Services, broker and gRPC are real, a generator is a process; steps of
the engine and passes of the trainer take the paper's times (Fig 6, Fig 2, Fig 8) on a clock that runs a few times as
fast, on which all that our services take weighs as many times as much. Colocated has all devices for each stage, the
others split them as is best for each, in flight with some generation to spare. Dispatch is the same in all. T_gen is
measured, with a trainer that takes no time.

Beside them stand ways to do it that are not ours: training on mini-batches of a quarter of the batch, and one-step
async, in which all instances change their weights at one barrier.

With real compute (benchmarks/real_run.py) vLLM and DeepSpeed share the cores that there are: the laptop example, whose
answers have a long tail by themselves. Colocated gives the trainer all cores in its turn. Fifty minutes.
"""

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil

from benchmarks.emulation.devices import NUM_DEVICES, best_split, scaled_s
from benchmarks.emulation.fleet import WARM_UP_ITERATIONS, Nursery, SteadyState, run_emulated
from benchmarks.emulation.plan import Emulation
from benchmarks.emulation.stages import (
    BATCH_SIZE,
    LENGTH_SETS,
    LONGEST_ANSWER,
    MAX_RUNNING,
    NUM_INSTANCES,
    PROFILE_DEVICES,
    PROMPTS_PER_BATCH,
    SAMPLES_PER_PROMPT,
    Stages,
)
from benchmarks.real_run import real_run
from benchmarks.result import Cell, Result

logger = logging.getLogger(__name__)

MEASURED_ITERATIONS = 3
AT_ONCE = 2
"""Emulated runs at a time. One keeps about half of a core busy: more would wait for cores, and not for devices."""
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
AT_BOUNDARIES = {"pipeline.mode": "async", "weights.swap": "boundary"}
ASYNC_MODES: dict[str, dict[str, Any]] = {
    "async": {"pipeline.mode": "async", "weights.swap": "in_flight"},
    "async_at_boundaries": AT_BOUNDARIES,
}
ASYNC_SPARE = {"async": 1.25, "async_at_boundaries": 1.0}
"""Of T_gen, for the split. In flight two batches share the time of the longest answers, and how long one takes depends
on when the one before has been trained: with T_gen and T_train equal, an iteration took 1.18 of them."""


def measure() -> Result:
    """Everything, one after the other."""
    result = Result(
        "throughput",
        {
            "emulated": {
                "devices": NUM_DEVICES,
                "generators": NUM_INSTANCES,
                "prompts_per_batch": PROMPTS_PER_BATCH,
                "samples_per_prompt": SAMPLES_PER_PROMPT,
                "max_running": MAX_RUNNING,
                "iterations": [WARM_UP_ITERATIONS, MEASURED_ITERATIONS],
                "load_s": LOAD_S,
                "at_once": AT_ONCE,
                "async_spare": ASYNC_SPARE,
                "sets": [asdict(lengths) for lengths in LENGTH_SETS],
            },
            "real": {"config": str(REAL_CONFIG), "rounds": REAL_ROUNDS, "settings": REAL_SETTINGS, "modes": REAL_MODES},
        },
    )
    with closing(Nursery()) as nursery:
        for lengths in LENGTH_SETS:
            result.cells += emulated_cells(Stages(lengths), nursery)
    result.cells += real_cells()
    return result


def emulated_cells(stages: Stages, nursery: Nursery) -> list[Cell]:
    """All modes on one set of lengths; async ones once it is known how long generation takes by itself, by which their
    devices are split."""
    everything = (NUM_DEVICES, NUM_DEVICES)
    sync_split = stages.sync_split()
    one_step_split = _async_split(stages, stages.generation_s(PROFILE_DEVICES))
    setups = {
        "colocated": Setup({"pipeline.mode": "colocated"}, everything, WHOLE_BATCH_SHARE),
        "sync": Setup({"pipeline.mode": "sync"}, sync_split),
        "sync_mini_batches": Setup({"pipeline.mode": "sync"}, sync_split, MINI_BATCH_SHARE),
        "one_step_async": Setup(AT_BOUNDARIES, one_step_split, WHOLE_BATCH_SHARE, global_barrier=True),
        **{
            f"{name}_alone": Setup(settings, (PROFILE_DEVICES, NUM_DEVICES), trains=False)
            for name, settings in ASYNC_MODES.items()
        },
    }
    states = _run_all(stages, nursery, setups)
    alone_s = {name: states.pop(f"{name}_alone").iteration_s for name in ASYNC_MODES}
    asynchronous = {
        name: Setup(settings, _async_split(stages, ASYNC_SPARE[name] * alone_s[name]))
        for name, settings in ASYNC_MODES.items()
    }
    states |= _run_all(stages, nursery, asynchronous)
    setups |= asynchronous
    goals = {"sync": SYNC_GOAL, "async": ASYNC_GOAL}
    cells = []
    for name, state in states.items():
        cells += _cells(stages, name, setups[name].split, state, states["colocated"], goals.get(name))
    for name in ASYNC_MODES:
        generation_s = _generation_s(alone_s[name], setups[name].split[0])
        cells += _bound_cells(f"{stages.lengths.name}/{name}", generation_s, states[name])
    return cells


@dataclass(frozen=True)
class Setup:
    """A mode on devices."""

    settings: Mapping[str, Any]
    split: tuple[int, int]
    """Devices of generation and of training."""
    saturation_share: float = STREAMED_SHARE
    """Of a batch's tokens: so many are worth a pass."""
    trains: bool = True
    global_barrier: bool = False


def _run_all(stages: Stages, nursery: Nursery, setups: Mapping[str, Setup]) -> dict[str, SteadyState]:
    with ThreadPoolExecutor(AT_ONCE) as threads:
        running = {name: threads.submit(_run, stages, nursery, setup) for name, setup in setups.items()}
        return {name: future.result() for name, future in running.items()}


def _bound_cells(prefix: str, generation_s: float, state: SteadyState) -> list[Cell]:
    over = state.iteration_s / max(generation_s, state.train_s)
    return [
        Cell(f"{prefix}/T_gen", generation_s, "s"),
        Cell(f"{prefix}/T_train", state.train_s, "s"),
        Cell.limited(f"{prefix}/over_bound", over, "of max(T_gen, T_train)", limit=BOUND_LIMIT),
        Cell.limited(f"{prefix}/idle_over_limit", state.trainer_idle, "of the time, the trainer", limit=IDLE_LIMIT),
    ]


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


def _run(stages: Stages, nursery: Nursery, setup: Setup) -> SteadyState:
    generating, training = setup.split
    emulation = Emulation(
        speed=stages.lengths.speed,
        longest_answer=LONGEST_ANSWER,
        max_running=MAX_RUNNING,
        step_ms=stages.step_ms(generating),
        prefill_token_ms=stages.prefill_token_ms(generating),
        load_s=LOAD_S,
        train_token_s=stages.train_token_s(training) if setup.trains else 0.0,
        global_barrier=setup.global_barrier,
    )
    saturation_tokens = round(setup.saturation_share * BATCH_SIZE * stages.mean_tokens)
    state = run_emulated(
        nursery,
        emulation,
        WARM_UP_ITERATIONS + MEASURED_ITERATIONS,
        {**setup.settings, "trainer.saturation_tokens": saturation_tokens},
    )
    logger.info("%s %s: %s", stages.lengths.name, setup, state)
    return state


def _cells(
    stages: Stages,
    mode: str,
    split: tuple[int, int],
    state: SteadyState,
    colocated: SteadyState,
    goal: float | None,
) -> list[Cell]:
    name, rate = f"{stages.lengths.name}/{mode}", state.samples_per_s
    unit = f"samples/s on {split[0]}+{split[1]} devices"
    if state is colocated:
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
