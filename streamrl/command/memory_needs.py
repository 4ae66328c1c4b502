"""How much memory a run takes on this machine, about: counted from the model's files before anything is loaded.

Activations are left out: they depend on `trainer.micro_batch_tokens`, which a user can lower. So are accelerators.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from streamrl.command.settings import Settings
from trainer_svc.algorithms import ALGORITHMS

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
_GRADIENT_BYTES = 4
_MASTER_BYTES = 4
_MOMENTS_BYTES = 8
# Measured: the processes of an engine on a CPU, and a trainer rank, without their weights.
_ENGINE_BYTES = int(3.0 * 1024**3)
_RANK_BYTES = int(1.0 * 1024**3)
_DEFAULT_KV_CACHE_GIB = 1.0
# The format's own limit.
_LONGEST_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes, over all processes on this machine."""

    num_parameters: int
    """Of the model."""
    policy: int
    """Weights, gradients and optimizer, over all ranks, as the next two."""
    critic: int
    reference: int
    ranks: int
    """The trainer's processes themselves."""
    generators: int

    @property
    def trainer(self) -> int:
        return self.policy + self.critic + self.reference + self.ranks

    @property
    def total(self) -> int:
        return self.trainer + self.generators

    def __str__(self) -> str:
        parts = {"policy": self.policy, "critic": self.critic, "reference": self.reference}
        named = ", ".join(f"{name} {_gib(size)}" for name, size in parts.items() if size)
        return (
            f"{_gib(self.total)} GiB for a model of {self.num_parameters / 1e6:,.1f} million parameters: trainer "
            f"{_gib(self.trainer)} ({named}), generators {_gib(self.generators)}"
        )


def _gib(size: int) -> str:
    return f"{size / 1024**3:.1f}"


def memory_needs(settings: Settings) -> MemoryNeeds | None:
    """What a run with these settings takes; None when its model is not in a folder of this machine.

    Raises:
        ValueError: a weight file of the model is damaged.
    """
    files = sorted(Path(settings.model.path).glob("*.safetensors"))
    if not files:
        return None
    count = sum(num_parameters(file) for file in files)
    trainer = settings.trainer
    weight_bytes = count * _DTYPE_BYTES[settings.model.dtype]
    # What each ZeRO stage shards over the ranks; all else is on every rank. float32 weights are their own masters.
    masters = 0 if settings.model.dtype == "float32" else _MASTER_BYTES
    parts = [(1, count * (_MOMENTS_BYTES + masters)), (2, count * _GRADIENT_BYTES), (3, weight_bytes)]
    copies = {stage: 1 if trainer.zero_stage >= stage else trainer.num_ranks for stage in (1, 2, 3)}
    policy_bytes = sum(part * copies[stage] for stage, part in parts)
    generator = settings.generator
    cache_bytes = int((generator.kv_cache_gib or _DEFAULT_KV_CACHE_GIB) * 1024**3)
    # Twice the weights: the next version is fetched while the engine still runs the present one.
    each = _ENGINE_BYTES + cache_bytes + 2 * weight_bytes
    return MemoryNeeds(
        num_parameters=count,
        policy=policy_bytes,
        # A little less: it has no output layer.
        critic=policy_bytes if ALGORITHMS[trainer.algorithm].has_critic else 0,
        reference=weight_bytes * copies[3] if trainer.kl != "none" else 0,
        ranks=trainer.num_ranks * _RANK_BYTES,
        generators=generator.num_instances * each,
    )


def num_parameters(file: Path) -> int:
    """Parameters in a safetensors file, from its header.

    Raises:
        ValueError: it is none.
    """
    with file.open("rb") as opened:
        start = opened.read(8)
        length = int.from_bytes(start, "little")
        header = opened.read(length) if length <= _LONGEST_HEADER_BYTES else b""
    try:
        tensors = json.loads(header)
        return sum(math.prod(tensor["shape"]) for name, tensor in tensors.items() if name != "__metadata__")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is no safetensors file, or is damaged: {error}") from error
