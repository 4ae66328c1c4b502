"""summary.json: what a run did, in one object, for people and for whoever started it. Pure, but for the writing."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from streamrl.whole_file import replace_file
from trainer_svc.lineage import Lineage
from trainer_svc.rollout_counts import RolloutCounts

RunStatus = Literal["completed", "stopped", "failed"]


@dataclass(frozen=True)
class RunTotals:
    """What the summary is made of."""

    run_id: str
    attempt: int
    lineage: Lineage
    wall_s: float
    """From the first training prompt written to the last step, blocking evaluations apart."""
    counts: RolloutCounts
    redispatched: int
    dead_letters: int
    idle_trainer: float
    idle_generator: float
    bytes_full: int
    bytes_sent: int
    mlflow_tracking_uri: str
    mlflow_run_id: str


def summarise(status: RunStatus, totals: RunTotals) -> dict[str, Any]:
    """The summary of a run. Evaluations that never took place are 0 over 0 prompts; an accuracy
    outside 0 to 1, which rewards of another scale can have, counts as the nearer end."""
    lineage, counts = totals.lineage, totals.counts
    first, last = lineage.first_evaluation, lineage.last_evaluation
    return {
        "status": status,
        "run_id": totals.run_id,
        "iterations": lineage.iteration,
        "wall_s": totals.wall_s,
        "samples_per_s": _rate(counts.trained, totals.wall_s),
        "tokens_per_s": _rate(counts.generated_tokens, totals.wall_s),
        "eval": {
            "first": _share(first.accuracy) if first else 0.0,
            "last": _share(last.accuracy) if last else 0.0,
            "num_prompts": last.num_prompts if last else 0,
        },
        "reward": {"first": lineage.first_reward or 0.0, "last": lineage.last_reward or 0.0},
        "rollouts": {
            "expected": counts.expected,
            "received": counts.received,
            "trained": counts.trained,
            "duplicate": counts.duplicate,
            "dropped": dict(counts.dropped),
            "redispatched": totals.redispatched,
            "dead_letters": totals.dead_letters,
        },
        "staleness_max": lineage.staleness_max,
        "idle": {"trainer": _share(totals.idle_trainer), "generator": _share(totals.idle_generator)},
        "weights": {
            "version": lineage.iteration,
            "bytes_full": totals.bytes_full,
            "bytes_sent": totals.bytes_sent,
        },
        "attempts": totals.attempt,
        "mlflow": {"tracking_uri": totals.mlflow_tracking_uri, "run_id": totals.mlflow_run_id},
        "report": None,
    }


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Writes `summary.json` whole or not at all."""
    replace_file(folder / "summary.json", json.dumps(summary) + "\n", flush=True)


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))
