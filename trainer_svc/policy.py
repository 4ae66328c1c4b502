"""The model under DeepSpeed: gradients of un-normalised sums, one division, one step.

A step of any cut of a batch into micro-batches, on any number of ranks and at any ZeRO stage, is the step of the whole
batch at once. Which samples make a micro-batch, and when a step is due, is decided elsewhere; checkpoints as a whole
are trainer_svc/checkpoint.py, of which this writes and reads DeepSpeed's part.

How the division is done. Micro-batches come in unknown number, and with `managed_gradient_accumulation` off DeepSpeed
takes `step()` as the boundary. It averages over ranks what should be summed, so the sum is divided by
count / world size, which is known only then:
    ZeRO 1-3            the divisor is given as the loss scale of this step (1 during backward passes): the optimizer
                        divides its reduced partitions and the norm that clips them by it
    bfloat16 at ZeRO 1  has an optimizer of its own without a loss scale: its float32 accumulators are divided
    ZeRO 0              has no optimizer of its own either: reduced, divided, measured and clipped here
"""

import contextlib
import gc
import logging
import math
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer_svc.losses import MAX_NAMES, OFF_POLICY, SUM_NAMES, SURROGATES, ClipRange, policy_loss, token_logprobs
from trainer_svc.microbatches import MicroBatch, attention_mask, empty_micro_batch
from trainer_svc.rows import row_cost_of

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_BUCKET_ELEMENTS = 1 << 26
"""Gradients reduced, and ZeRO-3 parameters gathered, at a time."""
_DEEPSPEED_TAG = "deepspeed"


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
    effective_sample_share: float
    """Effective sample size of the tokens' importance weights, (sum w)^2 / sum w^2, over their number: 1 on-policy."""
    entropy: float
    logprob_abs_diff_mean: float
    """Between trainer and generator, staleness included."""
    logprob_abs_diff_max: float
    num_own_tokens: int
    """Tokens drawn under the version being trained: on these any difference is numerical mismatch."""
    own_logprob_abs_diff_mean: float
    own_logprob_abs_diff_max: float


def learning_rate_at(step: int, learning_rate: float, warmup_steps: int) -> float:
    """Of optimizer step `step` (0 is the first): linear from 1 / warmup_steps of the rate, then constant."""
    return learning_rate * min(1.0, (step + 1) / max(1, warmup_steps))


class Policy:
    """A causal language model that learns. Unless said otherwise every rank calls every method, in one order."""

    def __init__(
        self,
        model: nn.Module,
        *,
        algorithm: str,
        temperature: float,
        clip: ClipRange,
        off_policy: str,
        importance_limit: float,
        learning_rate: float,
        warmup_steps: int,
        betas: tuple[float, float],
        weight_decay: float,
        max_grad_norm: float,
        zero_stage: int,
        dtype: str,
        gradient_checkpointing: bool = False,
    ) -> None:
        """Takes over a transformers model; torch.distributed must be initialised (trainer_svc/ranks.py).

        Args:
            model: on any device, in any dtype; replaced parameters make other references to it useless.
            algorithm: a name in `losses.SURROGATES`.
            temperature: at which answers are drawn.
            clip: of the probability ratio.
            off_policy: a name in `losses.OFF_POLICY`.
            importance_limit: for its weights, above 1.
            learning_rate: of AdamW, constant after `warmup_steps`.
            weight_decay: of matrices; norms and biases do not decay.
            max_grad_norm: clips the norm of the divided gradient; 0 does not clip.
            zero_stage: 0 to 3. Stage 0 in bfloat16 runs as 1, the same update: DeepSpeed's stage 0 has no float32
                accumulation.
            dtype: "float32" or "bfloat16"; bfloat16 keeps float32 master weights and accumulates in float32.
            gradient_checkpointing: computes activations twice instead of keeping them.
        """
        self._surrogate = SURROGATES[algorithm]
        self._temperature = temperature
        self._clip = clip
        self._off_policy = OFF_POLICY[off_policy]
        self._importance_limit = importance_limit
        self._learning_rate = learning_rate
        self._warmup_steps = warmup_steps
        self._max_grad_norm = max_grad_norm
        if dtype == "bfloat16" and zero_stage == 0:
            zero_stage = 1
        self._zero_stage = zero_stage
        model.to(_DTYPES[dtype])
        _disable_dropout(model)
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        num_elements = sum(parameter.numel() for parameter in model.parameters())
        self.row_cost = row_cost_of(model.config, num_elements)
        """What a row of tokens costs; None: answers of this model cannot share one."""
        optimizer = torch.optim.AdamW(_parameter_groups(model, weight_decay), lr=learning_rate, betas=betas, fused=True)
        self._engine = _start_engine(model, optimizer, zero_stage, dtype, max_grad_norm, num_elements)
        self._engine.train()
        if zero_stage == 0:
            # `_step_without_zero` reduces, once; the engine's own step would do it again.
            self._engine.enable_backward_allreduce = False
        self._world_size = dist.get_world_size()
        self._rank = dist.get_rank()
        self._start_sums()

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return torch.device(self._engine.device)

    @property
    def num_steps(self) -> int:
        """Optimizer steps applied so far, over resumes."""
        return int(self._engine.global_steps) - int(self._engine.skipped_steps)

    def _start_sums(self) -> None:
        self._num_passes = 0
        self._sums = torch.zeros(len(SUM_NAMES), dtype=torch.float64, device=self.device)
        self._maxima = torch.zeros(len(MAX_NAMES), dtype=torch.float64, device=self.device)

    def accumulate(self, micro_batch: MicroBatch) -> None:
        """One forward and backward pass: adds the micro-batch's un-normalised gradient to this step's."""
        micro_batch = micro_batch.to(self.device)
        logprobs, entropies = self._answer_logprobs(
            micro_batch.token_ids,
            micro_batch.first_target,
            self._temperature,
            segments=micro_batch.segments,
            position_ids=micro_batch.position_ids,
        )
        loss, sums, maxima = policy_loss(
            self._surrogate,
            logprobs,
            entropies,
            micro_batch.behaviour_logprobs,
            micro_batch.advantages,
            micro_batch.sample_index,
            micro_batch.weights,
            micro_batch.own_version,
            clip=self._clip,
            off_policy=self._off_policy,
            importance_limit=self._importance_limit,
        )
        self._engine.backward(loss, scale_wrt_gas=False)
        self._sums += sums
        self._maxima = torch.maximum(self._maxima, maxima.double())
        self._num_passes += 1

    def _answer_logprobs(
        self,
        token_ids: Tensor,
        first_target: int,
        temperature: float,
        *,
        segments: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies (rows, width - first_target) of the tokens from `first_target` on.

        Without segments there is no attention mask: rows are padded on the right, where causal attention does not look,
        and the kernels for plain causal attention are used.
        """
        positions = torch.arange(first_target - 1, token_ids.shape[1] - 1, device=token_ids.device)
        shared = {} if segments is None else {"attention_mask": attention_mask(segments), "position_ids": position_ids}
        logits = self._engine(input_ids=token_ids, use_cache=False, logits_to_keep=positions, **shared).logits
        return token_logprobs(logits, token_ids[:, first_target:], temperature=temperature)

    def step(self, global_count: float) -> StepStats:
        """Divides the accumulated gradient by `global_count`, clips, and steps; the next sum starts from 0.

        A gradient that is not finite changes nothing but the statistics. Without any accumulated pass (all samples had
        advantage 0) the gradient is 0, and momentum moves the weights as it would have with those passes.

        Args:
            global_count: the same on every rank: sum of `Aggregation` counts over all ranks' samples, those of
                skipped equal-reward groups included. Above 0.
        """
        if not global_count > 0:
            raise ValueError(f"global_count must be above 0, got {global_count}")
        if self._num_passes == 0:
            self.accumulate(empty_micro_batch())
        learning_rate = learning_rate_at(self.num_steps, self._learning_rate, self._warmup_steps)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        num_steps = self.num_steps
        grad_norm = self._divide_and_step(global_count / self._world_size)
        applied = self.num_steps > num_steps
        dist.all_reduce(self._sums)
        dist.all_reduce(self._maxima, op=dist.ReduceOp.MAX)
        sums = dict(zip(SUM_NAMES, self._sums.tolist(), strict=True))
        maxima = dict(zip(MAX_NAMES, self._maxima.tolist(), strict=True))
        self._start_sums()
        num_tokens, num_own_tokens = int(sums["num_tokens"]), int(sums["num_own_tokens"])
        return StepStats(
            applied=applied,
            step=self.num_steps,
            learning_rate=learning_rate,
            loss=sums["loss"] / global_count,
            # A step that was not applied leaves DeepSpeed's figure of the one before in place.
            grad_norm=grad_norm if applied else math.inf,
            num_tokens=num_tokens,
            clip_fraction=sums["clipped"] / max(1, num_tokens),
            approx_kl=sums["kl"] / max(1, num_tokens),
            effective_sample_share=sums["importance"] ** 2 / max(1e-300, sums["importance_squared"] * num_tokens)
            if num_tokens
            else 1.0,
            entropy=sums["entropy"] / max(1, num_tokens),
            logprob_abs_diff_mean=sums["abs_diff"] / max(1, num_tokens),
            logprob_abs_diff_max=maxima["abs_diff_max"],
            num_own_tokens=num_own_tokens,
            own_logprob_abs_diff_mean=sums["own_abs_diff"] / max(1, num_own_tokens),
            own_logprob_abs_diff_max=maxima["own_abs_diff_max"],
        )

    def _divide_and_step(self, divisor: float) -> float:
        """Divides the gradient that DeepSpeed averages over ranks, steps, and returns the norm before clipping."""
        engine = self._engine
        if self._zero_stage == 0:
            return self._step_without_zero(divisor)
        if hasattr(engine.optimizer, "override_loss_scale"):
            engine.optimizer.override_loss_scale(divisor)
            engine.step()
            engine.optimizer.override_loss_scale(1.0)
        else:
            for gradient in engine.optimizer.get_grads_for_reduction()[0]:
                gradient.div_(divisor)
            engine.step()
        return float(engine.get_global_grad_norm())

    def _step_without_zero(self, divisor: float) -> float:
        engine = self._engine
        engine.buffered_allreduce_fallback()
        gradients = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
        torch._foreach_div_(gradients, divisor)
        grad_norm = torch.nn.utils.get_total_norm(gradients)
        if not torch.isfinite(grad_norm):
            engine.zero_grad()
            engine.global_steps += 1
            engine.skipped_steps += 1
            return float(grad_norm)
        if self._max_grad_norm > 0:
            torch._foreach_mul_(gradients, torch.clamp(self._max_grad_norm / (grad_norm + 1e-6), max=1.0))
        engine.step()
        return float(grad_norm)

    @torch.no_grad()
    def score(self, sequences: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[list[float]]:
        """Log-probs of every token but the first, given those before it, of each sequence (two tokens or more)."""
        width = max(len(sequence) for sequence in sequences)
        token_ids = torch.zeros(len(sequences), width, dtype=torch.int64)
        for row, sequence in enumerate(sequences):
            token_ids[row, : len(sequence)] = torch.tensor(sequence)
        logprobs, _ = self._answer_logprobs(token_ids.to(self.device), 1, temperature)
        rows = logprobs.tolist()
        return [row[: len(sequence) - 1] for row, sequence in zip(rows, sequences, strict=True)]

    @torch.no_grad()
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names, as transformers has them, and CPU copies of all tensors, each once (tied ones under the first name).

        Rank 0 gets the tensors, in the model's dtype; the others iterate too and get nothing. Under ZeRO-3 no more than
        one bucket of parameters is whole at any time.
        """
        for bucket in self._weight_buckets():
            with self._gathered([tensor for _, tensor in bucket]):
                # Not yielded from inside: what is gathered must not depend on how fast the caller takes it.
                copies = _cpu_copies(bucket) if self._rank == 0 else []
            yield from copies

    def _weight_buckets(self) -> Iterator[list[tuple[str, Tensor]]]:
        module = self._engine.module
        seen: set[int] = set()
        bucket: list[tuple[str, Tensor]] = []
        num_elements = 0
        # state_dict, not named_parameters: persistent buffers belong to the model too.
        for name, tensor in module.state_dict(keep_vars=True).items():
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            bucket.append((name, tensor))
            num_elements += int(getattr(tensor, "ds_numel", tensor.numel()))
            if num_elements >= _BUCKET_ELEMENTS:
                yield bucket
                bucket, num_elements = [], 0
        if bucket:
            yield bucket

    def _gathered(self, tensors: list[Tensor]) -> Any:
        import deepspeed

        partitioned = [tensor for tensor in tensors if hasattr(tensor, "ds_id")]
        return deepspeed.zero.GatheredParameters(partitioned, enabled=self._zero_stage == 3)

    def save(self, folder: Path) -> None:
        """Writes model, master weights and optimizer into the folder: DeepSpeed's files, one or two a rank."""
        self._engine.save_checkpoint(str(folder), tag=_DEEPSPEED_TAG, save_latest=False)

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote on as many ranks and at the same ZeRO stage. It unpickles: check digests before.

        Raises:
            ValueError: the folder holds another number of ranks or another kind of optimizer.
        """
        path, _ = self._engine.load_checkpoint(str(folder), tag=_DEEPSPEED_TAG)
        if path is None:
            raise ValueError(f"{folder} holds no DeepSpeed checkpoint that fits this trainer")

    def close(self) -> None:
        """Releases DeepSpeed's hooks and buffers."""
        self._engine.destroy()
        del self._engine
        gc.collect()


def _cpu_copies(bucket: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    return [(name, tensor.detach().to("cpu", copy=True).contiguous()) for name, tensor in bucket]


def _disable_dropout(model: nn.Module) -> None:
    """Generators sample without dropout; a policy that trains with it would train another distribution."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010 - not an attribute that nn.Module declares


def _parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if weight_decay == 0.0:
        return [{"params": trained, "weight_decay": 0.0}]
    return [
        {"params": [parameter for parameter in trained if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]


def _start_engine(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    zero_stage: int,
    dtype: str,
    max_grad_norm: float,
    num_elements: int,
) -> Any:
    deepspeed = _import_deepspeed()
    bucket_elements = min(num_elements, _BUCKET_ELEMENTS)
    config: dict[str, Any] = {
        # Sizes of micro-batches are ours; DeepSpeed only insists on a number.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": max_grad_norm if zero_stage > 0 else 0.0,
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_optimization": {
            "stage": zero_stage,
            "overlap_comm": False,
            "reduce_bucket_size": bucket_elements,
            "allgather_bucket_size": bucket_elements,
            "stage3_prefetch_bucket_size": bucket_elements,
        },
        "bf16": {"enabled": dtype == "bfloat16", "check_grad_overflow": True},
    }
    # Some of its parts print how much memory they took; standard output belongs to results.
    with contextlib.redirect_stdout(sys.stderr):
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def _import_deepspeed() -> Any:
    """DeepSpeed with its log lines in ours, on standard error, and without compiling anything at run time."""
    log = logging.getLogger("DeepSpeed")
    log.addFilter(lambda record: "Setting accelerator to CPU" not in record.msg)
    import deepspeed

    for handler in list(log.handlers):
        log.removeHandler(handler)
    log.setLevel(logging.WARNING)
    log.propagate = True
    warnings.filterwarnings("ignore", message="`torch.distributed.* is deprecated", category=FutureWarning)
    # Would build a C++ extension with ninja for a minute, on the first start, to save microseconds between CPU ranks.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
