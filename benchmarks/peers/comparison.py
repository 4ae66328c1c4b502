"""TRL's GRPOTrainer on the same machine: samples a second of both, and what both have learnt from as many samples.

Same model, prompts, group size, batch, lengths, dtype, loss (GRPO's advantages, mean over the tokens of the batch, clip
0.2, no KL) and optimizer; both have all cores. Answers have long tails because prompts ask for them: counting over
distances with a long tail, those of the SmolLM2 task distributed as the paper's lengths. Ours is `streamrl run` in mode
async, with one engine that has a place for each answer; TRL is what it is on CPUs: `generate` of transformers, all
answers at once. Both are in float32: in bfloat16 TRL keeps float32 weights and rounds within its passes alone, while
our engines have rounded weights, in which the first steps at such rates hardly show. TRL lives in an environment of its
own, made on the first run. Half an hour.
"""

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks import paper_workload
from benchmarks.real_run import RealRun, real_run
from benchmarks.result import Cell, Result
from streamrl.command.resolve import resolve
from trainer_svc.model_cache import default_cache_folder
from trainer_svc.models import resolve_model
from trainer_svc.settings import TrainerSettings
from trainer_svc.task import load_task

logger = logging.getLogger(__name__)

SAMPLES_GOAL = 2.0
LEARNING_GOAL = 0.9
"""Of TRL's mean reward in the last iterations: seeds differ by that much."""
LAST_ITERATIONS = 3
TRL_PACKAGES = ("torch==2.13.0", "transformers>=5.16.1,<5.20", "trl==1.16.0", "accelerate", "datasets")
_PROGRAM = Path(__file__).with_name("trl_program.py")
_COUNTING_TEMPLATE = "Count from 3 to 7: 3, 4, 5, 6, 7\nCount from 28 to 31: 28, 29, 30, 31\n{prompt}:"
_TOKENS_A_NUMBER = 4
"""Of SmolLM2, for numbers of two digits: comma, space, two digits."""
_LONGEST_COUNT = 30


@dataclass(frozen=True)
class Task:
    """What both learn."""

    name: str
    config: Path
    num_iterations: int
    rows_at_once: int
    """Of TRL's passes: the best of those that were tried."""
    assignments: Mapping[str, Any] = field(default_factory=dict)
    """Of our settings, over the example's."""


def measure() -> Result:
    """Both tasks."""
    result = Result("peers", {"trl": list(TRL_PACKAGES)})
    python = trl_python()
    with tempfile.TemporaryDirectory() as folder:
        for task in tasks(Path(folder)):
            result.cells += _compare(task, python, Path(folder), result.settings)
    return result


def tasks(folder: Path) -> list[Task]:
    """The laptop model on its own task, SmolLM2 on one with files in a folder."""
    train, held_out = folder / "counting_train.jsonl", folder / "counting_held_out.jsonl"
    rows = counting_rows(320, np.random.default_rng(0))
    for file, part in ((train, rows[64:]), (held_out, rows[:64])):
        file.write_text("".join(json.dumps(row) + "\n" for row in part))
    smollm2 = {
        "model.dtype": "float32",
        "data.train": train,
        "data.eval": held_out,
        "data.prompts_per_batch": 8,
        "data.template": json.dumps(_COUNTING_TEMPLATE),
        "generator.max_tokens": 128,
        "generator.max_model_len": 256,
        "generator.max_running": 64,
        "trainer.num_iterations": 8,
        "trainer.warmup_steps": 0,
        "eval.num_prompts": 64,
        "eval.every": 0,
    }
    laptop = {
        # What an engine takes for a step grows less than the answers in it: three batches share them.
        "pipeline.max_staleness": 2,
        # With one engine nothing is dealt, and learning how long answers will be costs a third of a core.
        "scheduler.length_model": "history",
        "generator.num_instances": 1,
        "generator.max_running": 256,
        "generator.enforce_eager": False,
        "trainer.num_iterations": 30,
        "eval.every": 0,
        "eval.num_prompts": 256,
    }
    return [
        Task("laptop", Path("examples/laptop.toml"), 30, 256, laptop),
        Task("smollm2", Path("examples/smollm2.toml"), 8, 16, smollm2),
    ]


def counting_rows(count: int, generator: np.random.Generator) -> list[dict[str, str]]:
    """Distinct prompts whose answers have the paper's lengths, scaled to what `_LONGEST_COUNT` numbers take."""
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < count:
        (numbers,) = paper_workload.scaled_lengths(1, _LONGEST_COUNT, generator).tolist()
        start = int(generator.integers(10, 100 - numbers))
        prompt = f"Count from {start} to {start + numbers - 1}"
        rows[prompt] = {"prompt": prompt, "answer": ", ".join(str(start + number) for number in range(numbers))}
    return list(rows.values())


def trl_python() -> Path:
    """The interpreter of an environment with TRL alone, made when it is not there."""
    folder = default_cache_folder() / "benchmarks" / "trl-1.16.0"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *TRL_PACKAGES], check=True)
        (folder / "complete").touch()
    return python


def _compare(task: Task, python: Path, folder: Path, told: dict[str, Any]) -> list[Cell]:
    values = {"pipeline.mode": "async", **task.assignments}
    settings = TrainerSettings.model_validate(
        resolve(task.config, [f"{name}={value}" for name, value in values.items()]).model_dump()
    )
    program = _trl_task(task, settings)
    theirs = _run_trl(python, program, folder, task.name)
    ours = real_run(task.config, values)
    shared = {name: value for name, value in program.items() if name not in ("train", "held_out", "model")}
    told[task.name] = {"both": shared, "ours": {name: str(value) for name, value in values.items()}}
    told[task.name]["rewards"] = {"ours": ours.rewards, "trl": theirs["rewards"]}
    told["versions_of_trl"] = theirs["versions"]
    return comparison_cells(task.name, ours, theirs, program["prompts_per_batch"] * program["samples_per_prompt"])


def comparison_cells(name: str, ours: RealRun, theirs: Mapping[str, Any], batch_size: int) -> list[Cell]:
    """From what came out to what is reported. TRL's first step, in which it warms up, does not count."""
    trl_rate = batch_size / fmean(theirs["step_s"][1:])
    rewards = [fmean(values[-LAST_ITERATIONS:]) for values in (ours.rewards, theirs["rewards"])]
    return [
        Cell.compared(
            f"{name}/samples", ours.samples_per_s, "samples/s", against="TRL", peer=trl_rate, goal=SAMPLES_GOAL
        ),
        Cell(f"{name}/trl/samples", trl_rate, "samples/s"),
        Cell.compared(f"{name}/last_reward", rewards[0], "mean", against="TRL", peer=rewards[1], goal=LEARNING_GOAL),
        Cell(f"{name}/trl/last_reward", rewards[1], "mean"),
        Cell(f"{name}/first_reward", ours.rewards[0], "mean", "TRL", ours.rewards[0] / max(1e-9, theirs["rewards"][0])),
        Cell(f"{name}/accuracy/before", ours.accuracy[0], "greedy, held out"),
        Cell(f"{name}/accuracy/after", ours.accuracy[1], "greedy, held out"),
        Cell(f"{name}/trl/accuracy/before", theirs["accuracy"][0], "greedy, held out"),
        Cell(f"{name}/trl/accuracy/after", theirs["accuracy"][1], "greedy, held out"),
        Cell(f"{name}/idle/trainer", ours.trainer_idle, "of the time"),
        Cell(f"{name}/idle/generator", ours.generator_idle, "of the time"),
        Cell(f"{name}/busy_cores", ours.busy_cores, f"of {os.cpu_count()} cores"),
    ]


def _trl_task(task: Task, settings: TrainerSettings) -> dict[str, Any]:
    model = resolve_model(
        settings.model.path, dtype=settings.model.dtype, seed=settings.run.seed, cache_folder=default_cache_folder()
    )
    loaded = load_task(settings, model)
    loaded.rewards.close()
    sets = {
        "train": loaded.prompts.train[: settings.data.prompts_per_batch * task.num_iterations],
        "held_out": loaded.prompts.evaluation[: settings.eval.num_prompts],
    }
    template = settings.data.template or "{prompt}"
    return {
        "model": str(model.folder),
        "dtype": settings.model.dtype,
        "stop_token_ids": list(loaded.stop_token_ids),
        "num_threads": os.cpu_count(),
        "seed": settings.run.seed,
        "num_iterations": task.num_iterations,
        "prompts_per_batch": settings.data.prompts_per_batch,
        "samples_per_prompt": settings.data.samples_per_prompt,
        "rows_at_once": task.rows_at_once,
        "max_tokens": settings.generator.max_tokens,
        "temperature": settings.generator.temperature,
        "learning_rate": settings.trainer.learning_rate,
        "betas": settings.trainer.betas,
        "max_grad_norm": settings.trainer.max_grad_norm,
        **{
            name: [
                {"prompt": template.replace("{prompt}", prompt.record.text), "answer": prompt.record.answer}
                for prompt in prompts
            ]
            for name, prompts in sets.items()
        },
    }


def _run_trl(python: Path, program: Mapping[str, Any], folder: Path, name: str) -> dict[str, Any]:
    task_file, result_file = folder / f"{name}.task.json", folder / f"{name}.result.json"
    task_file.write_text(json.dumps(program))
    environment = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": str(os.cpu_count())}
    subprocess.run(
        [python, _PROGRAM, task_file, result_file], check=True, stdout=sys.stderr, env=environment, cwd=folder
    )
    result: dict[str, Any] = json.loads(result_file.read_text())
    return result
