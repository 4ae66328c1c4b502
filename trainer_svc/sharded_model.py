"""A model under DeepSpeed: gradients of un-normalised sums, one division, one step.

A step of any cut of a batch into micro-batches, on any number of ranks and at any ZeRO stage, is the step of the whole
batch at once. What the loss is, is the affair of trainer_svc/policy.py and critic.py; which samples make a micro-batch,
and when a step is due, is decided elsewhere; checkpoints as a whole are trainer_svc/checkpoint.py, of which this writes
and reads DeepSpeed's part.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer_svc.adapters import PublishedTensor, WeightForm, published_tensors, without_adapters
from trainer_svc.host_store import HostStore
from trainer_svc.optimizer import OptimizerRules, learning_rate_at, parameter_groups

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""By `model.dtype`."""

_BUCKET_ELEMENTS = 1 << 26
"""Gradients reduced, and ZeRO-3 parameters gathered, at a time."""
_DEEPSPEED_TAG = "deepspeed"


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a model lies in memory."""

    zero_stage: int
    """0 to 3. Stage 0 in bfloat16 runs as 1, the same update: DeepSpeed's stage 0 has no float32 accumulation."""
    dtype: str
    """float32 or bfloat16; bfloat16 keeps float32 master weights and accumulates in float32."""
    gradient_checkpointing: bool = False
    """Computes activations twice instead of keeping them."""
    offload_optimizer: bool = False
    """Moments, and master weights where there are any, lie in host memory between steps."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one optimizer step did."""

    applied: bool
    """False: the gradient was not finite, and weights and optimizer are as before."""
    number: int
    """Optimizer steps applied so far, this one included."""
    num_skipped: int
    """Steps so far, over resumes, that were not applied."""
    learning_rate: float
    grad_norm: float
    """Before clipping, of the divided gradient; infinite when it was not applied."""


class ShardedModel:
    """A model that learns. Unless said otherwise every rank calls every method, in one order."""

    def __init__(self, model: nn.Module, rules: OptimizerRules, sharding: Sharding) -> None:
        """Takes over a model; torch.distributed must be initialised (trainer_svc/ranks.py).

        Args:
            model: on any device, in any dtype; replaced parameters make other references to it useless. It offers
                `gradient_checkpointing_enable` as models of transformers do.
        """
        self._rules = rules
        # See Sharding.zero_stage.
        self._zero_stage = 1 if sharding.dtype == "bfloat16" and sharding.zero_stage == 0 else sharding.zero_stage
        model.to(DTYPES[sharding.dtype])
        _disable_dropout(model)
        if sharding.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        optimizer = torch.optim.AdamW(
            parameter_groups(model, rules.weight_decay), lr=rules.learning_rate, betas=rules.betas, fused=True
        )
        self._engine = _start_engine(model, optimizer, self._zero_stage, sharding.dtype, rules.max_grad_norm)
        self._engine.train()
        if self._zero_stage == 0:
            # `_step_without_zero` reduces, once; the engine's own step would do it again.
            self._engine.enable_backward_allreduce = False
        self._world_size = dist.get_world_size()
        self._rank = dist.get_rank()
        self._host_store = HostStore() if sharding.offload_optimizer else None
        self._put_optimizer_out()

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return torch.device(self._engine.device)

    @property
    def num_steps(self) -> int:
        """Optimizer steps applied so far, over resumes."""
        return int(self._engine.global_steps) - int(self._engine.skipped_steps)

    def __call__(self, **inputs: Any) -> Any:
        """A forward pass."""
        return self._engine(**inputs)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of a loss that nobody has divided to this step's."""
        self._engine.backward(loss, scale_wrt_gas=False)

    def step(self, global_count: float) -> Step:
        """Divides the accumulated gradient by `global_count`, clips, and steps; the next sum starts from 0. At least
        one backward pass must have been.

        A gradient that is not finite changes nothing.

        Args:
            global_count: the same on every rank: sum of `Aggregation` counts over all ranks' samples, those of skipped
                equal-reward groups included. Above 0.
        """
        if not global_count > 0:
            raise ValueError(f"global_count must be above 0, got {global_count}")
        learning_rate = learning_rate_at(self.num_steps, self._rules)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        num_steps = self.num_steps
        with self._optimizer_brought_in():
            grad_norm = self._divide_and_step(global_count / self._world_size)
        applied = self.num_steps > num_steps
        # A step that was not applied leaves DeepSpeed's figure of the one before in place.
        num_skipped = int(self._engine.skipped_steps)
        return Step(applied, self.num_steps, num_skipped, learning_rate, grad_norm if applied else math.inf)

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
        if self._rules.max_grad_norm > 0:
            torch._foreach_mul_(gradients, torch.clamp(self._rules.max_grad_norm / (grad_norm + 1e-6), max=1.0))
        engine.step()
        return float(grad_norm)

    @contextlib.contextmanager
    def _optimizer_brought_in(self) -> Iterator[None]:
        if self._host_store is not None:
            self._host_store.bring_in()
        yield
        self._put_optimizer_out()

    def _put_optimizer_out(self) -> None:
        if self._host_store is not None:
            self._host_store.put_out(self._optimizer_tensors())

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        """What only steps need: moments, and master weights, which are the optimizer's parameters where they are not
        the model's own."""
        optimizer = self._engine.optimizer
        own = {id(parameter) for parameter in self._engine.module.parameters()}
        for parameter, state in getattr(optimizer, "optimizer", optimizer).state.items():
            if id(parameter) not in own:
                yield parameter
            # The count of steps is a number.
            yield from (value for value in state.values() if isinstance(value, Tensor) and value.ndim > 0)

    def without_adapters(self) -> contextlib.AbstractContextManager[None]:
        """Forward passes inside are those of the initial model, where adapters learn beside it."""
        return without_adapters(self._engine.module)

    @torch.no_grad()
    def weights(self, form: WeightForm = "merged") -> Iterator[tuple[str, Tensor]]:
        """Names, as transformers has them, and CPU copies of all tensors, each once (tied ones under the first name),
        with adapters merged, or only one of the two sides (their names: streamrl/adapters.py).

        Rank 0 gets the tensors, in the model's dtype; the others iterate too and get nothing. Under ZeRO-3 no more than
        one bucket of parameters is whole at any time.
        """
        for bucket in _buckets(published_tensors(self._engine.module, form)):
            with self._gathered([part for tensor in bucket for part in tensor.parts]):
                # Not yielded from inside: what is gathered must not depend on how fast the caller takes it.
                copies = _cpu_copies(bucket) if self._rank == 0 else []
            yield from copies

    def _gathered(self, tensors: list[Tensor]) -> Any:
        import deepspeed

        partitioned = [tensor for tensor in tensors if hasattr(tensor, "ds_id")]
        return deepspeed.zero.GatheredParameters(partitioned, enabled=self._zero_stage == 3)

    def save(self, folder: Path) -> None:
        """Writes what learns, master weights and optimizer into the folder: DeepSpeed's files, one or two a rank."""
        with self._optimizer_brought_in():
            self._engine.save_checkpoint(
                str(folder), tag=_DEEPSPEED_TAG, save_latest=False, exclude_frozen_parameters=True
            )

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote on as many ranks and at the same ZeRO stage. It unpickles: check digests before.

        Raises:
            ValueError: the folder holds another number of ranks, or of another kind of optimizer or model.
        """
        with self._optimizer_brought_in():
            path, _ = self._engine.load_checkpoint(str(folder), tag=_DEEPSPEED_TAG, custom_load_fn=_load_learning)
        if path is None:
            raise ValueError(f"{folder} holds no DeepSpeed checkpoint that fits this trainer")

    def close(self) -> None:
        """Releases DeepSpeed's hooks and buffers."""
        self._engine.destroy()
        del self._engine
        gc.collect()


def _buckets(tensors: Iterable[PublishedTensor]) -> Iterator[list[PublishedTensor]]:
    """About `_BUCKET_ELEMENTS` each, one tensor at least."""
    bucket: list[PublishedTensor] = []
    num_elements = 0
    for tensor in tensors:
        bucket.append(tensor)
        num_elements += sum(int(getattr(part, "ds_numel", part.numel())) for part in tensor.parts)
        if num_elements >= _BUCKET_ELEMENTS:
            yield bucket
            bucket, num_elements = [], 0
    if bucket:
        yield bucket


def _cpu_copies(bucket: Sequence[PublishedTensor]) -> list[tuple[str, Tensor]]:
    return [(tensor.name, tensor.value().to("cpu", copy=True).contiguous()) for tensor in bucket]


def _load_learning(src: Mapping[str, Tensor], dst: nn.Module) -> None:
    """What a checkpoint has into the model. Frozen parameters are not in it: they are as the model was loaded."""
    frozen = {name for name, parameter in dst.named_parameters() if not parameter.requires_grad}
    missing, unexpected = dst.load_state_dict(src, strict=False)
    if wrong := sorted({*missing} - frozen | {*unexpected}):
        raise ValueError(f"the checkpoint is of another model: {len(wrong)} tensors differ, such as {wrong[0]}")


def _disable_dropout(model: nn.Module) -> None:
    """Generators sample without dropout; a policy that trains with it would train another distribution."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010 - not an attribute that nn.Module declares


def _start_engine(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    zero_stage: int,
    dtype: str,
    max_grad_norm: float,
) -> Any:
    deepspeed = import_deepspeed()
    num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    # A buffer has this size. DeepSpeed wants a multiple of 2.
    bucket_elements = min(num_trained + num_trained % 2, _BUCKET_ELEMENTS)
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
            "stage3_prefetch_bucket_size": _BUCKET_ELEMENTS,
        },
        "bf16": {"enabled": dtype == "bfloat16", "check_grad_overflow": True},
    }
    # Some of its parts print how much memory they took; standard output belongs to results.
    with contextlib.redirect_stdout(sys.stderr):
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def import_deepspeed() -> Any:
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
