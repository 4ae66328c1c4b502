"""The laptop example in all three modes: throughput against colocated, idle shares, and what was learnt.

Real engines, real training, the same number of samples. The colocated mode is the baseline: each stage in turn on all
cores.
"""

import json
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks.result import Cell, Result

CONFIG = "examples/laptop.toml"
MODES = ("colocated", "sync", "async")
NUM_ITERATIONS = 20
THROUGHPUT_GOAL = 0.95
ACCURACY_GOAL = 0.85


def measure(seed: int = 0) -> Result:
    """Runs each mode once, one after the other."""
    result = Result("modes", {"config": CONFIG, "num_iterations": NUM_ITERATIONS, "seed": seed})
    with tempfile.TemporaryDirectory() as folder:
        summaries = {mode: _run(mode, seed, folder) for mode in MODES}
    baseline = summaries["colocated"]
    for mode, summary in summaries.items():
        for figure, unit in (("samples_per_s", "samples/s"), ("tokens_per_s", "tokens/s")):
            name, value = f"{mode}/{figure}", summary[figure]
            result.cells.append(
                Cell(name, value, unit)
                if mode == "colocated"
                else Cell.compared(
                    name, value, unit, against=f"colocated/{figure}", peer=baseline[figure], goal=THROUGHPUT_GOAL
                )
            )
        result.cells.append(
            Cell.compared(
                f"{mode}/eval", summary["eval"]["last"], "accuracy", against="1.0", peer=1.0, goal=ACCURACY_GOAL
            )
        )
        for stage, share in summary["idle"].items():
            result.cells.append(Cell(f"{mode}/idle/{stage}", share, "share of wall time"))
    return result


def _run(mode: str, seed: int, folder: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "streamrl.command.main", "run", CONFIG, "--json"]
    for setting in (
        f"pipeline.mode={mode}",
        f"run.seed={seed}",
        f"run.dir={folder}",
        f"trainer.num_iterations={NUM_ITERATIONS}",
    ):
        command += ["--set", setting]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary
