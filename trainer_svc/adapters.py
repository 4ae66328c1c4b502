"""LoRA (arXiv 2106.09685) with peft: small matrices that learn beside weights that stay as they are.

What leaves the trainer is merged, W + alpha / rank x B A, computed for each version from the frozen W, so that whoever
loads it sees a plain model; or the frozen weights once, and then A and B alone, for generators that compute the same
sum (streamrl/adapters.py).
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from streamrl.adapters import DOWN_SUFFIX, UP_SUFFIX, merge

WeightForm = Literal["merged", "frozen", "adapters"]
"""merged: the weights as they are now. frozen: what adapters learn beside. adapters: what is added to that."""

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
    """peft's layer around it, if it has one that is to be merged."""
    transposed: bool = False
    """Others see it with its two dimensions exchanged."""

    @property
    def parts(self) -> list[Tensor]:
        """All tensors that it is computed from."""
        if self.adapter is None:
            return [self.base]
        return [self.base, self.adapter.lora_A[_ADAPTER].weight, self.adapter.lora_B[_ADAPTER].weight]

    def value(self) -> Tensor:
        """It, in the base's dtype."""
        if self.adapter is not None:
            base, down, up = (part.detach() for part in self.parts)
            # Layers of GPT-2's kind keep their weights as (inputs, outputs).
            left, right = (down.T, up.T) if self.adapter.fan_in_fan_out else (up, down)
            return merge(self.name, base, left, right, self.adapter.scaling[_ADAPTER])
        return self.base.detach().T if self.transposed else self.base.detach()


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


def published_tensors(model: nn.Module, form: WeightForm = "merged") -> Iterator[PublishedTensor]:
    """All tensors of a model as others see them, each once (tied ones under the first name)."""
    layers = _adapted_layers(model)
    seen: set[int] = set()
    # state_dict, not named_parameters: persistent buffers belong to the model too.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen or any(part in name for part in _PARTS):
            continue
        seen.add(id(tensor))
        layer_name, is_base, last = name.rpartition(_BASE)
        layer = layers[layer_name] if is_base and last == "weight" else None
        public_name = f"{layer_name}.{last}" if is_base else name
        if form == "merged":
            yield PublishedTensor(public_name, tensor, layer)
        elif form == "frozen":
            yield PublishedTensor(public_name, tensor)
        elif layer is not None:
            yield from _halves(public_name, layer)
        else:
            # What nobody is sent must not change.
            assert not tensor.requires_grad, f"{name} learns as a whole, beside adapters that are published alone"


def _halves(name: str, layer: Any) -> Iterator[PublishedTensor]:
    """A layer's adapter, as the two matrices whose product is added to its weight."""
    down, up = layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight
    left, right = (down, up) if layer.fan_in_fan_out else (up, down)
    yield PublishedTensor(name + UP_SUFFIX, left, transposed=layer.fan_in_fan_out)
    yield PublishedTensor(name + DOWN_SUFFIX, right, transposed=layer.fan_in_fan_out)
