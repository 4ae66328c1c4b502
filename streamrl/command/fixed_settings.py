"""Which settings a run keeps for life: what its checkpoints and topics were made with. Pure.

Everything else may change from one attempt to the next.
"""

from collections.abc import Mapping
from typing import Any

from streamrl.command.settings import Settings

_DATA = "the order of the prompts, and the batches under way, are made with it"
_POLICY = "answers that are under way were drawn with it"
_OPTIMIZER = "the optimizer's state in the checkpoint has it"
_ADAPTERS = "the checkpoint has such adapters"
_TOPICS = "the run's topics have so many partitions"
_TRACKER = "the run is logged there"

FIXED: Mapping[str, str] = {
    "run.id": "it names the run",
    "run.dir": "the run lies there",
    "run.seed": _DATA,
    "run.attempt": "each resume raises it by itself",
    "pipeline.mode": "what is under way was admitted by its rules",
    "pipeline.max_staleness": "what is under way was admitted by it",
    "model.path": "the checkpoint is of this model",
    "model.dtype": "the checkpoint is in it",
    "data": _DATA,
    "eval.num_prompts": "evaluations are compared, and its prompts are kept out of training",
    "generator.max_tokens": _POLICY,
    "generator.temperature": _POLICY,
    "trainer.num_ranks": "the checkpoint has a part for each rank",
    "trainer.zero_stage": "the checkpoint is divided by it",
    "trainer.lora_rank": _ADAPTERS,
    "trainer.lora_alpha": _ADAPTERS,
    "trainer.lora_targets": _ADAPTERS,
    "trainer.betas": _OPTIMIZER,
    "trainer.weight_decay": _OPTIMIZER,
    "scheduler.max_instances": _TOPICS,
    "kafka.rollout_partitions": _TOPICS,
    "mlflow.tracking_uri": _TRACKER,
    "mlflow.experiment": _TRACKER,
}
"""Section, or key, to why it stays."""


def check_changes(before: Settings, after: Settings) -> None:
    """
    Raises:
        ValueError: a setting differs that the run keeps for life.
    """
    old, new = _flat(before.model_dump(mode="json")), _flat(after.model_dump(mode="json"))
    problems = []
    for name in sorted(old.keys() | new.keys()):
        reason = next((why for fixed, why in FIXED.items() if name == fixed or name.startswith(f"{fixed}.")), None)
        if reason is not None and old.get(name) != new.get(name):
            problems.append(f"{name} is {old.get(name)!r} in this run and cannot become {new.get(name)!r}: {reason}")
    if problems:
        raise ValueError("; ".join([*problems, "start a new run for another lineage"]))


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Keys with dots; what is not a table as it is."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
