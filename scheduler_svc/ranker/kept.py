"""The ranker in the run's folder: weights and what they were learned from, in safetensors. Nothing is pickled.

`ranker/ranker.safetensors` holds the network, the running mean of it, and the examples as arrays, so that a resumed run
goes on with all that it knew. What was kept of another network (another base model) is not taken.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from scheduler_svc.ranker.examples import Example
from scheduler_svc.ranker.learner import LengthLearner
from scheduler_svc.ranker.messages import FILE
from streamrl.whole_file import replace_file

_FORMAT = "1"


def save_ranker(folder: Path, base_model: str, learner: LengthLearner, examples: Sequence[Example]) -> None:
    """Writes the file anew, whole or not at all.

    Raises:
        OSError: it could not be written.
    """
    tensors = {f"network.{name}": value for name, value in learner.network.state_dict().items()}
    tensors |= {f"mean.{name}": value for name, value in learner.mean.state_dict().items()}
    tensors |= {f"examples.{name}": torch.from_numpy(value) for name, value in _arrays(examples).items()}
    metadata = {
        "format": _FORMAT,
        "base_model": base_model,
        "num_steps": str(learner.num_steps),
        "prompt_ids": json.dumps([example.prompt_id for example in examples]),
    }
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / FILE, save({name: value.contiguous() for name, value in tensors.items()}, metadata))


def load_ranker(folder: Path, base_model: str, learner: LengthLearner) -> list[Example]:
    """Takes up what was kept.

    Returns:
        The examples; the learner has the weights.

    Raises:
        FileNotFoundError: nothing was.
        ValueError: it is damaged, or of another network; the learner is as it was.
    """
    file = folder / FILE
    if not file.is_file():
        raise FileNotFoundError(file)
    try:
        with safe_open(file, "pt") as kept:
            metadata = kept.metadata() or {}
            tensors = {name: kept.get_tensor(name) for name in kept.keys()}  # noqa: SIM118  (no mapping)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    if (metadata.get("format"), metadata.get("base_model")) != (_FORMAT, base_model):
        raise ValueError(f"{file} is of base model {metadata.get('base_model')!r}, expected {base_model!r}")
    try:
        parts = {part: _state(tensors, part) for part in ("network", "mean")}
        examples = _examples(json.loads(metadata["prompt_ids"]), _state(tensors, "examples"))
        for part, state in parts.items():
            _check_fits(getattr(learner, part), state)
        num_steps = int(metadata["num_steps"])
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{file} does not fit: {error}") from error
    learner.network.load_state_dict(parts["network"])
    learner.mean.load_state_dict(parts["mean"])
    learner.num_steps = num_steps
    return examples


def _state(tensors: dict[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(f"{part}."): value for name, value in tensors.items() if name.startswith(f"{part}.")}


def _check_fits(network: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    expected = {name: value.shape for name, value in network.state_dict().items()}
    came = {name: value.shape for name, value in state.items()}
    if came != expected:
        raise KeyError(f"tensors {sorted(set(expected.items()) ^ set(came.items()))[:3]}")
    if not all(bool(value.isfinite().all()) for value in state.values()):
        raise ValueError("a weight is not a finite number")


def _arrays(examples: Sequence[Example]) -> dict[str, np.ndarray]:
    """Lists of different lengths, one behind the other, and where each ends."""
    return {
        "batch": np.array([example.batch for example in examples], dtype=np.int64),
        "token_ids": np.array([token for example in examples for token in example.token_ids], dtype=np.int32),
        "token_ends": np.cumsum([len(example.token_ids) for example in examples], dtype=np.int64),
        "lengths": np.array([length for example in examples for length in example.lengths], dtype=np.int32),
        "cut": np.array([cut for example in examples for cut in example.cut], dtype=np.uint8),
        "answer_ends": np.cumsum([len(example.lengths) for example in examples], dtype=np.int64),
    }


def _examples(prompt_ids: list[str], arrays: dict[str, torch.Tensor]) -> list[Example]:
    """The inverse of `_arrays`. Who learns from an example without tokens or answers would die of it: such a one shows
    that the arrays are damaged."""
    lists = {name: array.tolist() for name, array in arrays.items()}
    found, token_start, answer_start = [], 0, 0
    for index, prompt_id in enumerate(prompt_ids):
        token_end, answer_end = lists["token_ends"][index], lists["answer_ends"][index]
        answers = slice(answer_start, answer_end)
        example = Example(
            prompt_id,
            lists["batch"][index],
            tuple(lists["token_ids"][token_start:token_end]),
            tuple(lists["lengths"][answers]),
            tuple(map(bool, lists["cut"][answers])),
        )
        complete = example.token_ids and example.lengths and len(example.lengths) == len(example.cut)
        if not complete or min(example.token_ids) < 0 or min(example.lengths) < 1:
            raise ValueError(f"what was kept of prompt {prompt_id!r} is no example")
        found.append(example)
        token_start, answer_start = token_end, answer_end
    return found
