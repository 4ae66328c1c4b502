"""The critic of PPO: what reward is still to be expected at each token of an answer.

A copy of the initial model without its vocabulary, with a value head that starts at 0, under an optimizer of its own.
How advantages come from values is trainer_svc/advantages.py; how a step comes about, trainer_svc/sharded_model.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer_svc.losses import VALUE_SUM_NAMES, value_loss
from trainer_svc.microbatches import MicroBatch, empty_micro_batch
from trainer_svc.optimizer import OptimizerRules
from trainer_svc.policy import attention_inputs
from trainer_svc.sharded_model import ShardedModel, Sharding

_FOLDER = "critic"


@dataclass(frozen=True, slots=True)
class CriticStats:
    """What one optimizer step of the critic did, over all ranks and micro-batches."""

    applied: bool
    """False: the gradient was not finite, and weights and optimizer are as before."""
    learning_rate: float
    loss: float
    grad_norm: float
    """Before clipping, of the divided gradient; infinite when it was not applied."""
    num_tokens: int
    clip_fraction: float
    """Tokens whose value has moved further than it may."""
    value_mean: float
    return_mean: float
    explained_variance: float
    """1 - mean squared error / variance of the returns: 1 is perfect, 0 no better than their mean."""
    num_skipped: int = 0
    """Steps so far, over resumes, that were not applied."""


class ValueHead(nn.Module):
    """A linear map to one number, in float32 whatever the model's dtype."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., hidden_size) to (...)."""
        return nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float()).squeeze(-1)


class ValueModel(nn.Module):
    """The body of a transformers model under a value head."""

    def __init__(self, language_model: Any) -> None:
        """
        Args:
            language_model: causal, of transformers; its output layer is left behind.
        """
        super().__init__()
        self.body = language_model.base_model
        self.value_head = ValueHead(language_model.config.hidden_size)

    def gradient_checkpointing_enable(self, options: dict[str, Any]) -> None:
        """As that of transformers."""
        self.body.gradient_checkpointing_enable(options)

    def forward(self, input_ids: Tensor, positions: Tensor, **attention: Any) -> Tensor:
        """Values (rows, len(positions)) after the tokens at these positions of `input_ids` (rows, width)."""
        hidden = self.body(input_ids=input_ids, use_cache=False, **attention).last_hidden_state
        values: Tensor = self.value_head(hidden[:, positions])
        return values


class Critic:
    """A value model that learns. Every rank calls every method, in one order."""

    def __init__(self, language_model: nn.Module, *, clip: float, rules: OptimizerRules, sharding: Sharding) -> None:
        """Takes over a transformers model; torch.distributed must be initialised (trainer_svc/ranks.py).

        Args:
            clip: as `value_loss`.
        """
        self._clip = clip
        self._model = ShardedModel(ValueModel(language_model), rules, sharding)
        self._start_sums()

    def _start_sums(self) -> None:
        self._num_passes = 0
        self._sums = torch.zeros(len(VALUE_SUM_NAMES), dtype=torch.float64, device=self._model.device)

    @torch.no_grad()
    def values(self, micro_batch: MicroBatch) -> Tensor:
        """Of the state before each target, (rows, targets): what the token before it has seen."""
        return self._values(micro_batch.to(self._model.device))

    def accumulate(self, micro_batch: MicroBatch) -> None:
        """One forward and backward pass: adds the micro-batch's un-normalised gradient to this step's."""
        micro_batch = micro_batch.to(self._model.device)
        assert micro_batch.values is not None and micro_batch.returns is not None, "samples without values"
        loss, sums = value_loss(
            self._values(micro_batch), micro_batch.values, micro_batch.returns, micro_batch.weights, clip=self._clip
        )
        self._model.backward(loss)
        self._sums += sums
        self._num_passes += 1

    def _values(self, micro_batch: MicroBatch) -> Tensor:
        positions = micro_batch.targets - 1
        values: Tensor = self._model(
            input_ids=micro_batch.token_ids, positions=positions, **attention_inputs(micro_batch)
        )
        return values

    def step(self, global_count: float) -> CriticStats:
        """As `Policy.step`."""
        if self._num_passes == 0:
            self.accumulate(empty_micro_batch())
        step = self._model.step(global_count)
        dist.all_reduce(self._sums)
        sums = dict(zip(VALUE_SUM_NAMES, self._sums.tolist(), strict=True))
        self._start_sums()
        num_tokens = max(1, int(sums["num_tokens"]))
        return_mean = sums["returns"] / num_tokens
        variance = sums["returns_squared"] / num_tokens - return_mean**2
        return CriticStats(
            applied=step.applied,
            learning_rate=step.learning_rate,
            loss=sums["loss"] / global_count,
            grad_norm=step.grad_norm,
            num_tokens=int(sums["num_tokens"]),
            clip_fraction=sums["clipped"] / num_tokens,
            value_mean=sums["values"] / num_tokens,
            return_mean=return_mean,
            # Returns that are all alike leave nothing to explain.
            explained_variance=1 - sums["squared_error"] / num_tokens / variance if variance > 1e-12 else 0.0,
            num_skipped=step.num_skipped,
        )

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """As `ShardedModel.weights`."""
        return self._model.weights()

    def save(self, folder: Path) -> None:
        """Writes its part of a checkpoint, beside the policy's."""
        self._model.save(folder / _FOLDER)

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote; as `ShardedModel.load`."""
        self._model.load(folder / _FOLDER)

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Whether a checkpoint has a critic."""
        return (folder / _FOLDER).is_dir()

    def close(self) -> None:
        """Releases DeepSpeed's hooks and buffers."""
        self._model.close()
