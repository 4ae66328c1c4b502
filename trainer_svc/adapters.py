"""LoRA (arXiv 2106.09685) with peft: small matrices that learn beside weights that stay as they are.

What leaves the trainer is merged, W + alpha / rank x B A, computed for each version from the frozen W: generators, and
whoever loads the final model, see a plain model. Adapters are not published by themselves.
"""

import contextlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_ADAPTER = "default"
"""peft's name of the one adapter."""
_BASE = ".base_layer."
_PARTS = (".lora_A.", ".lora_B.")


@dataclass(frozen=True, slots=True)
class LoraRules:
    """Which layers get adapters, and which."""

    rank: int
    alpha: float
    """What an adapter adds is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Last parts of layers' names, such as q_proj. None: every linear layer but the output layer."""


@dataclass(frozen=True, slots=True)
class PublishedTensor:
    """One tensor of the model as others see it; its parts must be whole (ZeRO-3 divides them) when it is computed."""

    name: str
    """As transformers has it."""
    base: Tensor
    adapter: Any = None
    """peft's layer around it, if there is one."""

    @property
    def parts(self) -> list[Tensor]:
        """All tensors that it is computed from."""
        if self.adapter is None:
            return [self.base]
        return [self.base, self.adapter.lora_A[_ADAPTER].weight, self.adapter.lora_B[_ADAPTER].weight]

    def merged(self) -> Tensor:
        """Its value, in the base's dtype; summed in float32 or wider."""
        if self.adapter is None:
            return self.base.detach()
        wide = torch.promote_types(self.base.dtype, torch.float32)
        base, down, up = (part.detach().to(wide) for part in self.parts)
        # Layers of GPT-2's kind keep their weights as (inputs, outputs).
        left, right = (down.T, up.T) if self.adapter.fan_in_fan_out else (up, down)
        merged = torch.addmm(base, left, right, alpha=self.adapter.scaling[_ADAPTER])
        if self.base.dtype == torch.bfloat16:
            return _dithered(merged, seed=zlib.crc32(self.name.encode()))
        return merged.to(self.base.dtype)


def _dithered(values: Tensor, seed: int) -> Tensor:
    """float32 to bfloat16: each element to the number below or above it, by a threshold of its own from 0 to 1 between
    the two, the same in every version.

    The nearest one would be the frozen weight for as long as an adapter's part is less than half of its last digit, as
    it is for many steps: the generators would see nothing of what is learnt. So as many elements move as do on average.
    """
    generator = torch.Generator(values.device).manual_seed(seed)
    thresholds = torch.randint(1 << 16, values.shape, generator=generator, dtype=torch.int32, device=values.device)
    # bfloat16 is the upper half of a float32's bits.
    return ((values.view(torch.int32) + thresholds) & -(1 << 16)).view(torch.float32).to(torch.bfloat16)


def add_adapters(model: nn.Module, rules: LoraRules) -> None:
    """Puts adapters into a transformers model and freezes everything else. They begin as nothing: B is 0.

    Raises:
        ValueError: a target is no linear layer of the model, or is its output layer.
    """
    from peft import LoraConfig, inject_adapter_in_model

    output_layer = model.get_output_embeddings()  # type: ignore[operator]
    linear = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if _is_linear(module) and module is not output_layer
    }
    unknown = sorted(set(rules.targets) - linear)
    if unknown:
        raise ValueError(
            f"trainer.lora_targets: {', '.join(unknown)}: expected linear layers of {type(model).__name__}, its output "
            f"layer apart: {', '.join(sorted(linear))}"
        )
    targets = list(rules.targets) if rules.targets else "all-linear"
    inject_adapter_in_model(
        LoraConfig(r=rules.rank, lora_alpha=rules.alpha, target_modules=targets, lora_dropout=0.0, bias="none"), model
    )


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _adapted_layers(model: nn.Module) -> dict[str, Any]:
    """peft's layers by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Forward passes inside are those of the frozen weights alone."""
    layers = _adapted_layers(model).values()
    try:
        for layer in layers:
            # peft's own switch would also change what of it learns, which DeepSpeed has taken note of.
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def published_tensors(model: nn.Module) -> Iterator[PublishedTensor]:
    """All tensors of a model as others see them, each once (tied ones under the first name), adapters merged."""
    layers = _adapted_layers(model)
    seen: set[int] = set()
    # state_dict, not named_parameters: persistent buffers belong to the model too.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen or any(part in name for part in _PARTS):
            continue
        seen.add(id(tensor))
        layer, is_base, last = name.rpartition(_BASE)
        if not is_base:
            yield PublishedTensor(name, tensor)
        else:
            yield PublishedTensor(f"{layer}.{last}", tensor, layers[layer] if last == "weight" else None)
