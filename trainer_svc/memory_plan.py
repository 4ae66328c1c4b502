"""What training takes of a device's memory, by part, counted before anything is loaded. Pure.

Estimates for transformers of the usual form (attention, gated MLP, RMS norms). Left out: what libraries take for
themselves, fragmentation, and what answers that share a prompt need besides their tokens: a mask where they are padded,
the prompt's keys and values once for each where they are packed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
_MASTER_BYTES = 4
_MOMENTS_BYTES = 8
_WIDE_BYTES = 4
_REDUCED_ELEMENTS = 1 << 26
"""Gradients that stage 1 copies into a buffer of its own to reduce them."""
_LIVE_PARAMETERS = 10**9
"""That ZeRO-3 holds whole at a time, by DeepSpeed's default."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What of a model decides how much memory it takes."""

    parameters: Mapping[str, tuple[int, ...]]
    """Shapes by name, as in its files."""
    config: Mapping[str, Any]

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.parameters.values())

    def num_adapter_parameters(self, rank: int, targets: tuple[str, ...]) -> int:
        """Of LoRA of this rank on these layers, by the last part of their names; none: all matrices but embeddings and
        the output layer.

        Raises:
            ValueError: there is no such layer.
        """
        sizes: dict[str, int] = {}
        for name, shape in self.parameters.items():
            layer = name.removesuffix(".weight").rpartition(".")[2]
            if layer not in _VOCABULARY_LAYERS and len(shape) == 2 and name.endswith(".weight"):
                sizes[layer] = sizes.get(layer, 0) + sum(shape)
        if unknown := sorted(set(targets) - set(sizes)):
            raise ValueError(
                f"trainer.lora_targets: {', '.join(unknown)}: expected linear layers of the model, its output layer "
                f"apart: {', '.join(sorted(sizes))}"
            )
        return rank * sum(size for layer, size in sizes.items() if not targets or layer in targets)


_VOCABULARY_LAYERS = {"embed_tokens", "lm_head", "wte", "wpe", "embed_out", "embed_in"}


@dataclass(frozen=True, slots=True)
class Practice:
    """What the settings decide about memory."""

    dtype: str
    num_ranks: int
    zero_stage: int
    pass_tokens: int
    """Most of one forward and backward pass."""
    has_critic: bool
    has_reference: bool
    """A copy of the model's own."""
    gradient_checkpointing: bool
    offload_optimizer: bool
    offload_reference: bool
    lora_rank: int
    lora_targets: tuple[str, ...]


_PARTS = ("actor", "critic", "reference", "optimizers", "activations")


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes on one rank's device."""

    actor: int
    """Weights and gradients of the policy, as of the critic."""
    critic: int
    reference: int
    optimizers: int
    """Moments, and master weights."""
    activations: int
    """Of the largest pass, logits included; 0 where the model's config does not say enough."""
    snapshot: int
    """Of a version on its way to weights_svc: in rank 0's host memory."""
    resting: int
    """On the device while nothing is computed."""
    offloaded: int
    """In host memory while it is not needed."""
    peak: int
    """The most of it on the device at one time: less than the sum where parts are offloaded."""

    def __str__(self) -> str:
        named = [f"{name} {size_text(size)}" for name in _PARTS if (size := getattr(self, name))]
        unknown = "" if self.activations else ", and activations, which the model's config does not tell"
        return f"{size_text(self.peak)} ({', '.join(named)}{unknown})"


def size_text(size: int) -> str:
    """In GiB, or MiB below one."""
    return f"{size / 1024**3:.1f} GiB" if size >= 1024**3 else f"{-(-size // 1024**2)} MiB"


def rank_memory(shape: ModelShape, practice: Practice) -> RankMemory:
    """What one rank's device holds.

    Raises:
        ValueError: adapters are asked for on layers that the model does not have.
    """
    count, dtype_bytes = shape.num_parameters, DTYPE_BYTES[practice.dtype]
    lora = practice.lora_rank > 0
    trained = shape.num_adapter_parameters(practice.lora_rank, practice.lora_targets) if lora else count
    # bfloat16 at stage 0 runs as stage 1.
    stage = 1 if practice.dtype == "bfloat16" and practice.zero_stage == 0 else practice.zero_stage

    def share(size: int, from_stage: int) -> int:
        return -(-size // practice.num_ranks) if stage >= from_stage else size

    weights = share((count + (trained if lora else 0)) * dtype_bytes, 3)
    if stage == 3:
        weights += min(count, _LIVE_PARAMETERS) * dtype_bytes
    gradients = share(trained * _WIDE_BYTES, 2)
    if stage == 1:
        gradients += min(trained, _REDUCED_ELEMENTS) * _WIDE_BYTES
    learning = weights + gradients
    optimizer = share(trained * (_MOMENTS_BYTES + (_MASTER_BYTES if stage > 0 else 0)), 1)
    num_learning = 2 if practice.has_critic else 1
    reference = weights if practice.has_reference else 0
    activations = activation_bytes(shape.config, practice)
    held = num_learning * learning
    if not practice.offload_reference:
        held += reference
    if not practice.offload_optimizer:
        held += num_learning * optimizer
    brought_in = [activations]
    offloaded = 0
    if practice.offload_optimizer:
        brought_in.append(optimizer)
        offloaded += num_learning * optimizer
    if practice.offload_reference:
        brought_in.append(reference)
        offloaded += reference
    return RankMemory(
        actor=learning,
        critic=learning if practice.has_critic else 0,
        reference=reference,
        optimizers=num_learning * optimizer,
        activations=activations,
        snapshot=count * dtype_bytes,
        resting=held,
        offloaded=offloaded,
        peak=held + max(brought_in),
    )


def activation_bytes(config: Mapping[str, Any], practice: Practice) -> int:
    """What the largest forward pass keeps for its backward pass; 0: the config does not say enough.

    Per token and layer, in elements: two norms (input in float32, normalised, scaled), queries, keys, values and what
    attention makes of them, four of the MLP's width. At the end logits and their gradient.
    """
    try:
        hidden, layers, vocabulary = (int(config[key]) for key in ("hidden_size", "num_hidden_layers", "vocab_size"))
        inner, heads = int(config["intermediate_size"]), int(config["num_attention_heads"])
    except (KeyError, TypeError):
        return 0
    width = int(config.get("head_dim") or hidden // heads)
    queries, keys = heads * width, int(config.get("num_key_value_heads") or heads) * width
    dtype_bytes = DTYPE_BYTES[practice.dtype]
    layer = 2 * hidden * (_WIDE_BYTES + 2 * dtype_bytes) + (2 * queries + 2 * keys + 4 * inner) * dtype_bytes
    kept = layers * hidden * dtype_bytes + layer if practice.gradient_checkpointing else layers * layer
    return practice.pass_tokens * (kept + 2 * vocabulary * dtype_bytes)
