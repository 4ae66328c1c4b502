"""The ranker's file, damaged in ways that leave it readable."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from scheduler_svc.ranker.examples import Example
from scheduler_svc.ranker.kept import load_ranker, save_ranker
from scheduler_svc.ranker.learner import LengthLearner
from scheduler_svc.ranker.messages import FILE

EXAMPLES = [Example("a", 0, (5, 6), (3, 4), (False, True)), Example("b", 1, (7,), (9,), (False,))]
WEIGHT = "network.head.inner.bias"


def _named(prompt_ids: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda _tensors, metadata: metadata.update(prompt_ids=json.dumps(prompt_ids))


def _filled(name: str, value: float) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda tensors, _metadata: tensors.update({name: torch.full_like(tensors[name], value)})


@pytest.mark.parametrize(
    "damage",
    [
        _named(None),
        _named(["a", "b", "c"]),
        _filled("examples.token_ends", 0),
        _filled("examples.answer_ends", 0),
        _filled("examples.lengths", 0),
        _filled("examples.token_ids", -1),
        _filled(WEIGHT, float("nan")),
        lambda _tensors, metadata: metadata.update(num_steps="many"),
    ],
)
def test_what_nothing_could_be_learned_from_is_not_taken(
    tmp_path: Path, damage: Callable[[dict[str, Any], dict[str, Any]], None]
) -> None:
    learner, file = LengthLearner("", seed=0), tmp_path / FILE
    save_ranker(tmp_path, "", learner, EXAMPLES)
    assert load_ranker(tmp_path, "", learner) == EXAMPLES
    with safe_open(file, "pt") as kept:
        metadata, tensors = kept.metadata(), {name: kept.get_tensor(name) for name in kept.keys()}  # noqa: SIM118
    damage(tensors, metadata)
    save_file(tensors, file, metadata)
    with pytest.raises(ValueError, match=f"{FILE} does not fit: "):
        load_ranker(tmp_path, "", learner)
    assert all(value.isfinite().all() for value in learner.network.state_dict().values())
