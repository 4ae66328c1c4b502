"""Does one run with the command, as a user would, and takes its figures from the tracker that it logged to."""

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.curves.kept_run import FIGURES, KeptRun, Series, learning_settings
from benchmarks.curves.studies import PlannedRun
from benchmarks.result import package_versions
from streamrl.command.resolve import resolve
from streamrl.command.settings_text import public_settings
from streamrl.errors import StreamRLError
from streamrl.lifetime import spawn

_PATIENCE = ("scheduler.lease_s=40", "rpc.patience_s=600", "kafka.patience_s=600")
"""A machine that is busy with other things slows a run down, and changes nothing in it."""
_DIGITS = 6
"""Significant ones that are kept of a figure."""


class RunFailedError(StreamRLError):
    """A run did not complete, or what it left does not suffice for a curve."""


def settings_of(planned: PlannedRun) -> dict[str, dict[str, Any]]:
    """What the run would learn with, today.

    Raises:
        ValueError: they are no settings of a run.
    """
    return learning_settings(public_settings(resolve(Path(planned.config), planned.assignments)))


def perform(planned: PlannedRun, runs: Path) -> KeptRun:
    """Does a run from its beginning; what an earlier try has left in its folder goes.

    Args:
        runs: the folder that gets the run's; nothing in it is needed afterwards.

    Raises:
        RunFailedError: no whole run came of it; its folder stays.
    """
    folder = runs / planned.name
    shutil.rmtree(folder, ignore_errors=True)
    settings = settings_of(planned)
    summary = run_whole(planned.name, planned.config, (*planned.assignments, *_PATIENCE), folder)
    tracker = summary.pop("mlflow")
    figures = logged_figures(tracker["tracking_uri"], tracker["run_id"], FIGURES)
    _check(planned, summary, figures, settings)
    shutil.rmtree(folder)
    return KeptRun(
        name=planned.name,
        config=planned.config,
        assignments=list(planned.assignments),
        ended_at=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=package_versions(),
        settings=settings,
        summary=summary,
        figures=figures,
    )


def run_whole(
    name: str, config: str | Path, assignments: Sequence[str], folder: Path, *, log: Path | None = None
) -> dict[str, Any]:
    """Does a run as a user starts it, and returns its summary.

    Args:
        name: its id.
        assignments: as for `--set`.
        folder: the folder of its runs.
        log: gets what the command says; None: said here.

    Raises:
        RunFailedError: the command failed; the folder stays.
    """
    command = [sys.executable, "-m", "streamrl.command.main", "run", str(config)]
    for assignment in (*assignments, f"run.dir={folder}", f"run.id={name}"):
        command += ["--set", assignment]
    # Tied to this process: who interrupts the one ends the other.
    exit_code = spawn(command, log=log).wait()
    if exit_code != 0:
        raise RunFailedError(f"{name}: the command ended with exit code {exit_code}; its folder: {folder}")
    summary: dict[str, Any] = json.loads((folder / name / "summary.json").read_text())
    return summary


def logged_figures(tracking_uri: str, run_id: str, names: Sequence[str]) -> dict[str, Series]:
    """What a run has logged to MLflow of some figures; those that it has not are left out."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri)
    logged = client.get_run(run_id).data.metrics
    return {
        name: _series([(metric.step, metric.value) for metric in client.get_metric_history(run_id, name)])
        for name in names
        if name in logged
    }


def _series(points: Sequence[tuple[int, float]]) -> Series:
    points = sorted(points)
    return Series([step for step, _ in points], [float(f"{value:.{_DIGITS}g}") for _, value in points])


def _check(
    planned: PlannedRun,
    summary: Mapping[str, Any],
    figures: Mapping[str, Series],
    settings: Mapping[str, Mapping[str, Any]],
) -> None:
    """A curve has no gaps, and every evaluation all of its answers."""
    num_iterations, every = settings["trainer"]["num_iterations"], settings["eval"]["every"]
    evaluated = sorted({*range(0, num_iterations + 1, every), num_iterations})
    expected = {
        "reward/mean": Series(list(range(1, num_iterations + 1)), []),
        "eval/answers": Series(evaluated, [float(settings["eval"]["num_prompts"])] * len(evaluated)),
    }
    if summary["status"] != "completed":
        raise RunFailedError(f"{planned.name}: the run ended as {summary['status']}")
    for name, wanted in expected.items():
        found = figures.get(name, Series([], []))
        if list(found.steps) != list(wanted.steps):
            raise RunFailedError(f"{planned.name}: {name} is of steps {found.steps}, expected {wanted.steps}")
        if wanted.values and list(found.values) != list(wanted.values):
            raise RunFailedError(f"{planned.name}: {name} is {found.values}, expected {wanted.values}")
