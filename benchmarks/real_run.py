"""One `streamrl run` as a user starts it, and the cores that it keeps busy while it iterates."""

import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

_LOOK_S = 0.5
_ITERATION = re.compile(r" iteration (\d+) of \d+: reward ([0-9.]+)")


@dataclass(frozen=True)
class RealRun:
    """What came out. Shares are of the time from the first prompt to the last step."""

    samples_per_s: float
    tokens_per_s: float
    trainer_idle: float
    generator_idle: float
    busy_cores: float
    """Of all processes of the run, while it iterated."""
    rewards: tuple[float, ...]
    """The mean of each iteration."""
    accuracy: tuple[float, float]
    """Greedy, on held-out prompts, before and after."""


def real_run(config: Path, assignments: Mapping[str, Any]) -> RealRun:
    """Runs it to its end.

    Raises:
        subprocess.CalledProcessError: it failed; why is on standard error.
    """
    with tempfile.TemporaryDirectory() as folder:
        values = {**assignments, "run.dir": folder, "run.id": "benchmark"}
        command = [sys.executable, "-m", "streamrl.command.main", "run", str(config), "--json"]
        for name, value in values.items():
            command += ["--set", f"{name}={value}"]
        log = Path(folder) / "benchmark" / "logs" / "trainer.log"
        with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
            busy_cores = _watch(process, log)
            assert process.stdout is not None
            line = process.stdout.read()
        if process.returncode != 0:
            raise subprocess.CalledProcessError(process.returncode, command, line)
        rewards = tuple(float(reward) for _, reward in _ITERATION.findall(log.read_text()))
    summary = json.loads(line)
    return RealRun(
        samples_per_s=summary["samples_per_s"],
        tokens_per_s=summary["tokens_per_s"],
        trainer_idle=summary["idle"]["trainer"],
        generator_idle=summary["idle"]["generator"],
        busy_cores=busy_cores,
        rewards=rewards,
        accuracy=(summary["eval"]["first"], summary["eval"]["last"]),
    )


def _watch(process: "subprocess.Popen[bytes]", log: Path) -> float:
    """Waits for the end; the cores that were busy between the first iteration's end and the last one's."""
    looks: dict[int, list[tuple[float, float]]] = {}
    while process.poll() is None:
        time.sleep(_LOOK_S)
        text = log.read_text(errors="replace") if log.is_file() else ""
        looks.setdefault(len(_ITERATION.findall(text)), []).append((time.monotonic(), sum(_cpu_s(process.pid))))
    iterating = [look for count, of_count in looks.items() if 0 < count < max(looks) for look in of_count]
    if len(iterating) < 2:
        return 0.0
    (began_s, before_s), (ended_s, after_s) = iterating[0], iterating[-1]
    return (after_s - before_s) / (ended_s - began_s)


def _cpu_s(pid: int) -> Iterator[float]:
    """Processor seconds of a process and all below it that live."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                yield times.user + times.system
