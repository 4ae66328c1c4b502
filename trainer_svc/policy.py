"""The policy: log-probs of answers, and steps against its loss.

What the loss is made of is trainer_svc/losses.py; how a step comes about, trainer_svc/sharded_model.py.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer_svc.adapters import WeightForm
from trainer_svc.losses import MAX_NAMES, SUM_NAMES, PolicyObjective, policy_loss
from trainer_svc.microbatches import MicroBatch, attention_mask, empty_micro_batch
from trainer_svc.optimizer import OptimizerRules
from trainer_svc.packed_attention import PACKED
from trainer_svc.rows import row_cost_of
from trainer_svc.sharded_model import ShardedModel, Sharding
from trainer_svc.token_logprobs import token_logprobs


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one optimizer step did, over all ranks and micro-batches. Differences in nats, over trained tokens."""

    applied: bool
    """False: the gradient was not finite, and weights and optimizer are as before."""
    step: int
    """Optimizer steps applied so far, this one included."""
    learning_rate: float
    loss: float
    grad_norm: float
    """Before clipping, of the divided gradient; infinite when it was not applied."""
    num_tokens: int
    """Tokens that went through a pass; tokens of skipped equal-reward groups did not."""
    clip_fraction: float
    approx_kl: float
    """k3 estimate of KL(behaviour || current)."""
    reference_kl: float | None
    """k3 estimate of KL(current || reference); None without a reference."""
    effective_sample_share: float
    """Effective sample size of the tokens' importance weights, (sum w)^2 / sum w^2, over their number: 1 on-policy."""
    importance_limited_share: float
    """Tokens whose importance weight is above the limit or below its inverse."""
    entropy: float
    logprob_abs_diff_mean: float
    """Between trainer and generator, staleness included."""
    logprob_abs_diff_max: float
    num_own_tokens: int
    """Tokens drawn under the version being trained: on these any difference is numerical mismatch."""
    own_logprob_abs_diff_mean: float
    own_logprob_abs_diff_max: float
    own_kl: float
    """k3 estimate of KL(behaviour || current) on those tokens."""
    num_skipped: int = 0
    """Steps so far, over resumes, that were not applied."""


class Policy:
    """A causal language model that learns. Unless said otherwise every rank calls every method, in one order."""

    def __init__(
        self,
        model: nn.Module,
        *,
        objective: PolicyObjective,
        temperature: float,
        rules: OptimizerRules,
        sharding: Sharding,
    ) -> None:
        """Takes over a transformers model; torch.distributed must be initialised (trainer_svc/ranks.py).

        Args:
            model: as `ShardedModel`.
            temperature: at which answers are drawn.
        """
        self._objective = objective
        self._temperature = temperature
        config: Any = model.config
        self._model = ShardedModel(model, rules, sharding)
        self.row_cost = row_cost_of(config, self._model.num_parameters)
        """What a row of tokens costs; None: answers of this model cannot share one."""
        self.packs = config._attn_implementation == PACKED
        """Whether micro-batches are packed."""
        self._start_sums()

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._model.device

    def _start_sums(self) -> None:
        self._num_passes = 0
        self._sums = torch.zeros(len(SUM_NAMES), dtype=torch.float64, device=self.device)
        self._maxima = torch.zeros(len(MAX_NAMES), dtype=torch.float64, device=self.device)

    def accumulate(self, micro_batch: MicroBatch) -> None:
        """One forward and backward pass: adds the micro-batch's un-normalised gradient to this step's."""
        micro_batch = micro_batch.to(self.device)
        logprobs, entropies = answer_logprobs(self._model, micro_batch, self._temperature)
        loss, sums, maxima = policy_loss(self._objective, logprobs, entropies, micro_batch)
        self._model.backward(loss)
        self._sums += sums
        self._maxima = torch.maximum(self._maxima, maxima.double())
        self._num_passes += 1

    @torch.no_grad()
    def answer_logprobs(self, micro_batch: MicroBatch) -> Tensor:
        """Of each answer token, under the present weights: (rows, targets), as `MicroBatch` has them."""
        return answer_logprobs(self._model, micro_batch.to(self.device), self._temperature)[0]

    @torch.no_grad()
    def initial_logprobs(self, micro_batch: MicroBatch) -> Tensor:
        """The same under the weights that adapters learn beside: the initial model's."""
        with self._model.without_adapters():
            return self.answer_logprobs(micro_batch)

    def step(self, global_count: float) -> StepStats:
        """Divides the accumulated gradient by `global_count`, clips, and steps; the next sum starts from 0.

        A gradient that is not finite changes nothing but the statistics. Without any accumulated pass (all samples had
        advantage 0) the gradient is 0, and momentum moves the weights as it would have with those passes.

        Args:
            global_count: as `ShardedModel.step`.
        """
        if self._num_passes == 0:
            self.accumulate(empty_micro_batch())
        step = self._model.step(global_count)
        dist.all_reduce(self._sums)
        dist.all_reduce(self._maxima, op=dist.ReduceOp.MAX)
        sums = dict(zip(SUM_NAMES, self._sums.tolist(), strict=True))
        maxima = dict(zip(MAX_NAMES, self._maxima.tolist(), strict=True))
        self._start_sums()
        num_tokens, num_own_tokens = int(sums["num_tokens"]), int(sums["num_own_tokens"])
        return StepStats(
            applied=step.applied,
            step=step.number,
            learning_rate=step.learning_rate,
            loss=sums["loss"] / global_count,
            grad_norm=step.grad_norm,
            num_tokens=num_tokens,
            clip_fraction=sums["clipped"] / max(1, num_tokens),
            approx_kl=sums["kl"] / max(1, num_tokens),
            reference_kl=sums["reference_kl"] / sums["num_reference_tokens"] if sums["num_reference_tokens"] else None,
            effective_sample_share=sums["importance"] ** 2 / max(1e-300, sums["importance_squared"] * num_tokens)
            if num_tokens
            else 1.0,
            importance_limited_share=sums["importance_limited"] / max(1, num_tokens),
            entropy=sums["entropy"] / max(1, num_tokens),
            logprob_abs_diff_mean=sums["abs_diff"] / max(1, num_tokens),
            logprob_abs_diff_max=maxima["abs_diff_max"],
            num_own_tokens=num_own_tokens,
            own_logprob_abs_diff_mean=sums["own_abs_diff"] / max(1, num_own_tokens),
            own_logprob_abs_diff_max=maxima["own_abs_diff_max"],
            own_kl=sums["own_kl"] / max(1, num_own_tokens),
            num_skipped=step.num_skipped,
        )

    @torch.no_grad()
    def score(self, sequences: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[list[float]]:
        """Log-probs of every token but the first, given those before it, of each sequence (two tokens or more)."""
        width = max(len(sequence) for sequence in sequences)
        token_ids = torch.zeros(len(sequences), width, dtype=torch.int64)
        for row, sequence in enumerate(sequences):
            token_ids[row, : len(sequence)] = torch.tensor(sequence)
        targets = torch.arange(1, width, device=self.device)
        logprobs, _ = _target_logprobs(self._model, token_ids.to(self.device), targets, temperature, {})
        rows = logprobs.tolist()
        return [row[: len(sequence) - 1] for row, sequence in zip(rows, sequences, strict=True)]

    def weights(self, form: WeightForm = "merged") -> Iterator[tuple[str, Tensor]]:
        """As `ShardedModel.weights`."""
        return self._model.weights(form)

    def save(self, folder: Path) -> None:
        """As `ShardedModel.save`."""
        self._model.save(folder)

    def load(self, folder: Path) -> None:
        """As `ShardedModel.load`."""
        self._model.load(folder)

    def close(self) -> None:
        """As `ShardedModel.close`."""
        self._model.close()


def answer_logprobs(model: Callable[..., Any], micro_batch: MicroBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (rows, targets) of a micro-batch's targets, by a causal language model of transformers,
    which has taken trainer_svc/packed_attention.py if the micro-batch is packed."""
    inputs = attention_inputs(micro_batch)
    return _target_logprobs(model, micro_batch.token_ids, micro_batch.targets, temperature, inputs)


def attention_inputs(micro_batch: MicroBatch) -> dict[str, Any]:
    """Without segments there is no attention mask: rows are packed, or padded on the right, where causal attention does
    not look, and the kernels for plain causal attention are used."""
    if micro_batch.spans is not None:
        return {"spans": micro_batch.spans, "position_ids": micro_batch.position_ids}
    if micro_batch.segments is None:
        return {}
    return {"attention_mask": attention_mask(micro_batch.segments), "position_ids": micro_batch.position_ids}


def _target_logprobs(
    model: Callable[..., Any], token_ids: Tensor, targets: Tensor, temperature: float, inputs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    logits = model(input_ids=token_ids, use_cache=False, logits_to_keep=targets - 1, **inputs).logits
    return token_logprobs(logits, token_ids[:, targets], temperature=temperature)
