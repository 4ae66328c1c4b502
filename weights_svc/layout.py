"""Where the tensors of a version lie in its safetensors file, known before any of their data has come.

The file is one that the safetensors library wrote itself: an 8-byte length, a JSON header padded to 8 bytes, then the
data without gaps. Tensors lie in the order of their item sizes, largest first, so that each is aligned for its dtype;
within a size they keep the order in which they come, so that the file is written from front to back.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from streamrl.dtypes import ITEM_BYTES
from streamrl.v1.weights_pb2 import TensorInfo

_ALIGNMENT_BYTES = 8
_METADATA_KEY = "__metadata__"


@dataclass(frozen=True, slots=True)
class FileLayout:
    """A safetensors file but for its data."""

    header: bytes
    """The file's beginning, up to the first tensor."""
    positions: tuple[int, ...]
    """Byte position in the file of each tensor, in the order in which the tensors were given."""
    num_bytes: int
    """Size of the whole file."""


def lay_out(tensors: Sequence[TensorInfo]) -> FileLayout:
    """The layout of these tensors, always the same for the same tensors.

    Raises:
        ValueError: there are none, two have one name, or the length of one does not fit its dtype and shape.
    """
    _check(tensors)
    in_file = sorted(range(len(tensors)), key=lambda index: -ITEM_BYTES[tensors[index].dtype])
    offsets = [0] * len(tensors)
    entries: dict[str, object] = {_METADATA_KEY: {"format": "pt"}}
    end = 0
    for index in in_file:
        tensor = tensors[index]
        offsets[index], end = end, end + tensor.num_bytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offsets[index], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    header = len(text).to_bytes(8, "little") + text
    return FileLayout(header, tuple(len(header) + offset for offset in offsets), len(header) + end)


def _check(tensors: Sequence[TensorInfo]) -> None:
    if not tensors:
        raise ValueError("a version without tensors: expected one at least")
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen or tensor.name in ("", _METADATA_KEY):
            raise ValueError(f"tensor name {tensor.name!r} comes twice or is reserved: expected a name of its own")
        seen.add(tensor.name)
        if tensor.dtype not in ITEM_BYTES:
            raise ValueError(f"{tensor.name} has dtype {tensor.dtype!r}: expected one of {', '.join(ITEM_BYTES)}")
        if any(size < 0 for size in tensor.shape):
            raise ValueError(f"{tensor.name} has shape {list(tensor.shape)}: expected no negative size")
        expected = math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
        if tensor.num_bytes != expected:
            raise ValueError(
                f"{tensor.name} is said to have {tensor.num_bytes} bytes: {tensor.dtype} of shape "
                f"{list(tensor.shape)} has {expected}"
            )
