"""Weights that travel as LoRA adapters: what such tensors are called, and the sum that makes weights of them.

Trainer and generators compute the same sum: who is sent adapters has, up to rounding, the weights that others are sent
merged.
torch is imported where it is used: what only looks at names does without.
"""

import zlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from streamrl.v1.weights_pb2 import TensorInfo, VersionManifest

if TYPE_CHECKING:
    import torch

UP_SUFFIX = ".lora_up"
"""Behind the name of a tensor W of shape (rows, columns): its adapter's (rows, rank)."""
DOWN_SUFFIX = ".lora_down"
"""Likewise: (rank, columns)."""
_STRETCH_ELEMENTS = 1 << 24


def why_unfit(base: VersionManifest, adapted: VersionManifest) -> str | None:
    """Why the adapters of a version cannot be added to the tensors of another; None: they can. Pure."""
    weights = {tensor.name: tensor for tensor in base.tensors}
    adapters = {tensor.name: tensor for tensor in adapted.tensors}
    for name in adapters:
        target, suffix = _split(name)
        if target not in weights:
            return f"{name} has no tensor in version {base.weight_version} that it could be added to"
        if target + (DOWN_SUFFIX if suffix == UP_SUFFIX else UP_SUFFIX) not in adapters:
            return f"{name} comes without its other half"
        if suffix == UP_SUFFIX and (reason := _misshapen(weights[target], adapters[name], adapters)):
            return reason
    return None


def _misshapen(weight: TensorInfo, up: TensorInfo, adapters: dict[str, TensorInfo]) -> str | None:
    down = adapters[weight.name + DOWN_SUFFIX]
    fits = len(up.shape) == len(down.shape) == 2 and up.shape[1] == down.shape[0]
    if fits and [up.shape[0], down.shape[1]] == list(weight.shape):
        return None
    shapes = " x ".join(str(list(part.shape)) for part in (up, down))
    return f"{weight.name} of shape {list(weight.shape)} has an adapter of {shapes}"


def _split(name: str) -> tuple[str, str]:
    """The tensor that an adapter's is for, and its suffix; empty names for what is none."""
    for suffix in (UP_SUFFIX, DOWN_SUFFIX):
        if name.endswith(suffix):
            return name.removesuffix(suffix), suffix
    return "", ""


def merged_tensors(
    base: "Iterable[tuple[str, torch.Tensor]]",
    adapters: "Iterable[tuple[str, torch.Tensor]]",
    scaling: float,
    device: "torch.device",
) -> "Iterator[tuple[str, torch.Tensor]]":
    """The tensors of the base by name, one at a time: those with an adapter merged, on the device, the others as they
    are.

    Args:
        adapters: by names with `UP_SUFFIX` and `DOWN_SUFFIX`, of the base's tensors.
    """
    parts = dict(adapters)
    for name, tensor in base:
        up, down = parts.get(name + UP_SUFFIX), parts.get(name + DOWN_SUFFIX)
        if up is None or down is None:
            yield name, tensor
        else:
            yield name, merge(name, tensor.to(device), up.to(device), down.to(device), scaling)


def merge(
    name: str, weight: "torch.Tensor", up: "torch.Tensor", down: "torch.Tensor", scaling: float
) -> "torch.Tensor":
    """weight + scaling x up @ down (rows, columns), summed in float32 or wider, then in the weight's dtype. One stretch
    of rows at a time: on a device that is full there is no room for a whole layer in float32.

    Args:
        name: of the weight: what is rounded where follows from it.
    """
    import torch

    wide = torch.promote_types(weight.dtype, torch.float32)
    generator = torch.Generator(weight.device).manual_seed(zlib.crc32(name.encode()))
    merged = torch.empty_like(weight)
    num_rows = max(1, _STRETCH_ELEMENTS // max(1, weight.shape[1]))
    for first in range(0, weight.shape[0], num_rows):
        rows = slice(first, first + num_rows)
        exact = weight[rows].to(wide, copy=True).addmm_(up[rows].to(wide), down.to(wide), alpha=scaling)
        merged[rows] = _dithered(exact, generator) if weight.dtype == torch.bfloat16 else exact
    return merged


def _dithered(values: "torch.Tensor", generator: "torch.Generator") -> "torch.Tensor":
    """float32 to bfloat16, in place: each element to the number below or above it, by a threshold of its own from 0 to
    1 between the two, the same in every version.

    The nearest one would be the frozen weight for as long as an adapter's part is less than half of its last digit, as
    it is for many steps: the generators would see nothing of what is learnt. So as many elements move as do on average.
    """
    import torch

    thresholds = torch.randint(1 << 16, values.shape, generator=generator, dtype=torch.int32, device=values.device)
    # bfloat16 is the upper half of a float32's bits.
    values.view(torch.int32).add_(thresholds).bitwise_and_(-(1 << 16))
    return values
