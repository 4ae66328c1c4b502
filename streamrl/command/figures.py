"""What is shown of a run, as text: pure functions from what its services said. Drawing is in display.py."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from streamrl.command.observer import Observation
from streamrl.v1.sample_pb2 import PURPOSE_TRAIN
from streamrl.v1.scheduler_pb2 import GetFleetResponse, Instance, InstanceState
from streamrl.v1.trainer_pb2 import TrainerServiceGetStatusResponse


@dataclass(frozen=True)
class Figure:
    """A metric of the trainer as people read it."""

    metric: str
    """Its name in MLflow."""
    label: str
    format: str
    """A format specification; % multiplies by 100."""


FIGURES = (
    Figure("reward/mean", "reward", ".3f"),
    Figure("eval/accuracy", "last accuracy", ".3f"),
    Figure("throughput/samples_per_s", "samples/s", ".1f"),
    Figure("throughput/tokens_per_s", "tokens/s", ",.0f"),
    Figure("staleness/max", "staleness", ".0f"),
    Figure("idle/trainer", "trainer idle", ".0%"),
    Figure("idle/generator", "generators idle", ".0%"),
)


_ENDING = ("stopping", "done")
"""States of a trainer that begins nothing more."""


def figures(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Label and value of the figures that have one."""
    return [
        (figure.label, format(metrics[figure.metric], figure.format)) for figure in FIGURES if figure.metric in metrics
    ]


def iteration_line(status: TrainerServiceGetStatusResponse) -> str:
    """One line on the iteration that ended last."""
    parts = [f"{label} {value}" for label, value in figures(status.metrics)]
    return "  ".join(
        [f"iteration {status.iteration}/{status.num_iterations}", *parts, f"version {status.weight_version}"]
    )


def trainer_sentence(observation: Observation) -> str:
    """What the trainer does, in a few words."""
    status = observation.trainer
    if status is None:
        return "trainer: starting"
    if not observation.trainer_answers:
        return "trainer: ending" if status.state in _ENDING else "trainer: does not answer"
    return f"trainer: {status.state}" + (f", {status.waits_for}" if status.waits_for else "")


def waits(observation: Observation) -> list[str]:
    """Who waits for whom. Nobody, once the trainer ends: what it has asked for is not wanted any more."""
    trainer, fleet = observation.trainer, observation.fleet
    if fleet is None or (trainer is not None and trainer.state in _ENDING):
        return []
    return list(fleet.waits)


def fleet_sentence(fleet: GetFleetResponse | None, num_generators: int) -> str:
    """How many generators are there."""
    if fleet is None:
        return "scheduler: starting"
    live = sum(instance.state == InstanceState.INSTANCE_STATE_LIVE for instance in fleet.instances)
    return f"generators: {live} of {num_generators} ready"


def instance_state(instance: Instance) -> str:
    """live, draining or dead."""
    return InstanceState.Name(instance.state).removeprefix("INSTANCE_STATE_").lower()


def queue_depth(fleet: GetFleetResponse) -> tuple[int, int]:
    """Training samples that are with an instance, and that wait for one, for prompts or for a version."""
    batches = [batch for batch in fleet.batches if batch.purpose == PURPOSE_TRAIN]
    return sum(batch.outstanding for batch in batches), sum(batch.undispatched for batch in batches)


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The last line of a run as label and value, for people."""
    rollouts, dropped = summary["rollouts"], summary["rollouts"]["dropped"]
    dropped_text = ", ".join(f"{count} {reason}" for reason, count in dropped.items() if count) or "none"
    weights = summary["weights"]
    rows = [
        ("status", str(summary["status"])),
        ("iterations", f"{summary['iterations']} in {duration(summary['wall_s'])}, evaluations apart"),
        ("evaluation", _change(summary["eval"], ".3f", f" on {summary['eval']['num_prompts']} prompts")),
        ("reward", _change(summary["reward"], ".3f")),
        ("throughput", f"{summary['samples_per_s']:.1f} samples/s, {summary['tokens_per_s']:,.0f} tokens/s"),
        ("rollouts", f"{rollouts['trained']} trained of {rollouts['expected']}; dropped: {dropped_text}"),
        ("again", f"{rollouts['redispatched']} dispatched again, {rollouts['duplicate']} came twice"),
        ("attempts", str(summary["attempts"])),
        ("staleness", f"{summary['staleness_max']} at most"),
        ("idle", f"trainer {summary['idle']['trainer']:.0%}, generators {summary['idle']['generator']:.0%}"),
        ("weights", f"version {weights['version']}, {weights['bytes_sent'] / 1e6:,.1f} MB sent"),
    ]
    mlflow = summary["mlflow"]
    if mlflow["run_id"]:
        rows.append(("MLflow", f"run {mlflow['run_id']} at {mlflow['tracking_uri']}"))
    elif mlflow["tracking_uri"]:
        rows.append(("MLflow", f"nothing was kept at {mlflow['tracking_uri']}: the trainer's log says why"))
    if summary["status"] != "completed":
        rows.append(("go on with", f"streamrl resume {summary['run_id']}"))
    return rows


def duration(seconds: float) -> str:
    """Seconds as people say them: 42 s, 3 min 5 s, 2 h 10 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _change(values: Mapping[str, Any], format_spec: str, suffix: str = "") -> str:
    first, last = values.get("first"), values.get("last")
    if first is None or last is None:
        return "none"
    return f"{first:{format_spec}} → {last:{format_spec}}{suffix}"
