"""How much memory a run takes on this machine, about: counted from the model's files before anything is loaded.

What a trainer rank's device holds is trainer_svc/memory_plan.py. Here it is added up over the processes of a machine
that trains and generates on its CPUs.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from streamrl.command.settings import Settings
from trainer_svc.algorithms import ALGORITHMS
from trainer_svc.memory_plan import DTYPE_BYTES, ModelShape, Practice, RankMemory, rank_memory, size_text
from trainer_svc.model_cache import default_cache_folder
from trainer_svc.models import local_folder

# Measured: the processes of an engine on a CPU, and a trainer rank, without their weights.
_ENGINE_BYTES = int(3.0 * 1024**3)
_RANK_BYTES = int(1.0 * 1024**3)
_DEFAULT_KV_CACHE_GIB = 1.0
# The format's own limit.
_LONGEST_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes."""

    num_parameters: int
    """Of the model."""
    rank: RankMemory
    """On the device of each trainer rank."""
    trainer: int
    """Of this machine's memory where all devices are its CPUs: all ranks, and a snapshot on its way."""
    generators: int
    """Likewise."""
    trainer_host: int
    """Of this machine's memory where all devices are GPUs: what is offloaded to it, and a snapshot on its way."""

    @property
    def total(self) -> int:
        """Of a machine without GPUs."""
        return self.trainer + self.generators

    def __str__(self) -> str:
        return (
            f"{size_text(self.total)} for a model of {self.num_parameters / 1e6:,.1f} million parameters: trainer "
            f"{size_text(self.trainer)}, generators {size_text(self.generators)}; on the device of each trainer rank "
            f"{self.rank}, and on rank 0's host a snapshot of {size_text(self.rank.snapshot)}"
        )


def memory_needs(settings: Settings) -> MemoryNeeds | None:
    """What a run with these settings takes; None when its model is not on this machine yet.

    Raises:
        ValueError: a weight file of the model is damaged, or trainer.lora_targets names layers that it does not have.
    """
    try:
        folder = local_folder(settings.model.path, settings.run.seed, default_cache_folder())
    except ValueError:
        # There can be no such model: the trainer's own check says so, together with what else it finds.
        folder = None
    shape = model_shape(folder) if folder is not None else None
    if shape is None:
        return None
    generator, trainer = settings.generator, settings.trainer
    rank = rank_memory(shape, _practice(settings))
    cache_bytes = int((generator.kv_cache_gib or _DEFAULT_KV_CACHE_GIB) * 1024**3)
    # Twice the weights: the next version is fetched while the engine still runs the present one, or what adapters are
    # added to is kept beside it.
    each = _ENGINE_BYTES + cache_bytes + 2 * shape.num_parameters * DTYPE_BYTES[settings.model.dtype]
    return MemoryNeeds(
        num_parameters=shape.num_parameters,
        rank=rank,
        trainer=trainer.num_ranks * (_RANK_BYTES + rank.peak) + rank.snapshot,
        generators=generator.num_instances * each,
        trainer_host=trainer.num_ranks // trainer.num_nodes * (_RANK_BYTES + rank.offloaded) + rank.snapshot,
    )


def _practice(settings: Settings) -> Practice:
    trainer = settings.trainer
    # An answer that is longer than a micro-batch is one by itself.
    longest = settings.data.max_prompt_tokens + settings.generator.max_tokens
    if settings.generator.max_model_len:
        longest = min(longest, settings.generator.max_model_len)
    return Practice(
        dtype=settings.model.dtype,
        num_ranks=trainer.num_ranks,
        zero_stage=trainer.zero_stage,
        pass_tokens=max(trainer.micro_batch_tokens, longest),
        has_critic=ALGORITHMS[trainer.algorithm].has_critic,
        has_reference=trainer.kl != "none" and trainer.lora_rank == 0,
        gradient_checkpointing=trainer.gradient_checkpointing,
        offload_optimizer="optimizer" in trainer.offload,
        offload_reference="reference" in trainer.offload,
        lora_rank=trainer.lora_rank,
        lora_targets=trainer.lora_targets,
    )


def model_shape(folder: Path) -> ModelShape | None:
    """Of a model in Hugging Face's layout; None: there are no weights.

    Raises:
        ValueError: a weight file is damaged.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return None
    parameters = {name: shape for file in files for name, shape in parameter_shapes(file).items()}
    config = folder / "config.json"
    return ModelShape(parameters, json.loads(config.read_text()) if config.is_file() else {})


def parameter_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Of the parameters in a safetensors file, by name, from its header.

    Raises:
        ValueError: it is none.
    """
    with file.open("rb") as opened:
        start = opened.read(8)
        length = int.from_bytes(start, "little")
        header = opened.read(length) if length <= _LONGEST_HEADER_BYTES else b""
    try:
        tensors = json.loads(header)
        return {name: tuple(map(int, tensor["shape"])) for name, tensor in tensors.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is no safetensors file, or is damaged: {error}") from error
