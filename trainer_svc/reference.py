"""The reference: a frozen policy that the trained one is kept near.

It is the initial model: a copy of it, loaded anew by every attempt (checkpoints have nothing of it), or, where the
policy learns by adapters, the policy without them, which takes no memory. At ZeRO stage 3 a copy's parameters are
divided over the ranks like the policy's; at lower stages every rank has them all.
"""

import contextlib
import sys
from typing import Any

import torch
from torch import Tensor, nn

from trainer_svc.host_store import HostStore
from trainer_svc.microbatches import MicroBatch
from trainer_svc.policy import Policy, answer_logprobs
from trainer_svc.sharded_model import DTYPES, Sharding, import_deepspeed


class Reference:
    """A causal language model that does not learn. Every rank calls every method, in one order."""

    def __init__(self, model: nn.Module, *, temperature: float, sharding: Sharding, offload: bool = False) -> None:
        """Takes over a transformers model; torch.distributed must be initialised (trainer_svc/ranks.py).

        Args:
            temperature: at which answers are drawn.
            offload: it lies in host memory until it is brought in.
        """
        deepspeed = import_deepspeed()
        self._temperature = temperature
        self._device = torch.device(deepspeed.accelerator.get_accelerator().current_device_name())
        model.requires_grad_(False).to(DTYPES[sharding.dtype]).eval()
        self._engine: Any = None
        self._model: nn.Module = model
        if sharding.zero_stage == 3:
            config = {
                "train_micro_batch_size_per_gpu": 1,
                "zero_optimization": {"stage": 3},
                "bf16": {"enabled": sharding.dtype == "bfloat16"},
            }
            # Some of its parts print; standard output belongs to results.
            with contextlib.redirect_stdout(sys.stderr):
                self._engine, *_ = deepspeed.initialize(model=model, config=config)
            self._model = self._engine
            self._model.eval()
        else:
            model.to(self._device)
        self._host_store = HostStore(constant=True) if offload else None
        self.put_out()

    def bring_in(self) -> None:
        """Before a chunk of samples: once for all of them."""
        if self._host_store is not None:
            self._host_store.bring_in()

    def put_out(self) -> None:
        """After it."""
        if self._host_store is not None:
            # What ZeRO-3 has divided is this rank's part.
            self._host_store.put_out(getattr(part, "ds_tensor", part) for part in self._model.parameters())

    @torch.no_grad()
    def answer_logprobs(self, micro_batch: MicroBatch) -> Tensor:
        """As `Policy.answer_logprobs`, under the reference."""
        return answer_logprobs(self._model, micro_batch.to(self._device), self._temperature)[0]

    def close(self) -> None:
        """Releases DeepSpeed's hooks and buffers."""
        if self._engine is not None:
            self._engine.destroy()


class PolicyWithoutAdapters:
    """The frozen part of a policy that learns by adapters, as a reference."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def answer_logprobs(self, micro_batch: MicroBatch) -> Tensor:
        """As that of `Reference`."""
        return self._policy.initial_logprobs(micro_batch)

    def close(self) -> None:
        """Nothing: the policy is its owner's to close."""
