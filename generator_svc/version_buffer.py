"""Host memory that holds one whole weight version, shared by the process that fetches it and those that load it.

The memory is an anonymous file (`memfd_create`): it lies on no disk, is not bounded by the size of /dev/shm (64 MiB in
most containers), is mapped by an engine's workers without a copy, and is gone with the last process that holds it,
however that ends. This module knows nothing of gRPC or tensors' meaning; torch comes in only where tensors go out.
"""

import mmap
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from streamrl.v1.weights_pb2 import TensorInfo, VersionManifest

if TYPE_CHECKING:
    import torch

_ALIGNMENT_BYTES = 64
"""Each tensor begins on a cache line, which suits every dtype."""


def tensor_offsets(manifest: VersionManifest) -> tuple[list[int], int]:
    """Where each tensor lies.

    Returns:
        The first byte of each tensor, and the bytes of the whole.
    """
    offsets, position = [], 0
    for tensor in manifest.tensors:
        offsets.append(position)
        position += -(-tensor.num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return offsets, max(position, 1)


class VersionBuffer:
    """The bytes of one version, being filled or full. Close it when it is loaded."""

    def __init__(self, manifest: VersionManifest) -> None:
        self.manifest = manifest
        self._offsets, num_bytes = tensor_offsets(manifest)
        self._file = os.memfd_create(f"streamrl-version-{manifest.weight_version}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._file, num_bytes)
            self._memory = mmap.mmap(self._file, num_bytes)
        except BaseException:
            os.close(self._file)
            raise
        self._view = memoryview(self._memory)

    @property
    def path(self) -> str:
        """Opens the memory from another process of the same user, as long as this one has not closed it."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def write(self, tensor_index: int, offset: int, data: bytes | memoryview) -> None:
        """Puts data at a byte position inside a tensor; the caller keeps it inside the tensor.

        Written as to a file: half the time of page faults in the mapping, and no other thread is held up.
        """
        rest, position = memoryview(data), self._offsets[tensor_index] + offset
        while rest:
            written = os.pwrite(self._file, rest, position)
            rest, position = rest[written:], position + written

    def tensor_bytes(self, tensor_index: int) -> memoryview:
        """One tensor's bytes; release the view before `close`."""
        first = self._offsets[tensor_index]
        return self._view[first : first + self.manifest.tensors[tensor_index].num_bytes]

    def share(self) -> "VersionBuffer":
        """The same memory once more, to be closed by itself. Nobody writes into it any more."""
        shared = VersionBuffer.__new__(VersionBuffer)
        shared.manifest, shared._offsets = self.manifest, self._offsets
        shared._file = os.dup(self._file)
        shared._memory = mmap.mmap(shared._file, len(self._memory))
        shared._view = memoryview(shared._memory)
        return shared

    def close(self) -> None:
        """Gives the memory back; what workers have mapped stays with them."""
        if self._file >= 0:
            self._view.release()
            self._memory.close()
            os.close(self._file)
            self._file = -1


def open_tensors(path: str, manifest: VersionManifest) -> "Iterator[tuple[str, torch.Tensor]]":
    """The tensors of a full buffer, in the manifest's order.

    The file is mapped copy-on-write: nobody who writes into a tensor changes what others see.

    Args:
        path: `VersionBuffer.path` of the process that holds it.

    Raises:
        OSError: the buffer is gone.
        ValueError: a dtype that torch does not have, or a size that does not fit dtype and shape.
    """
    offsets, num_bytes = tensor_offsets(manifest)
    with open(path, "rb") as file:  # noqa: PTH123  (a link in /proc, not a path)
        memory = mmap.mmap(file.fileno(), num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    for tensor, first in zip(manifest.tensors, offsets, strict=True):
        yield tensor.name, _as_tensor(memory, first, tensor)


def _as_tensor(memory: mmap.mmap, first: int, info: TensorInfo) -> "torch.Tensor":
    import torch

    dtype: torch.dtype | None = getattr(torch, _TORCH_DTYPES.get(info.dtype, ""), None)
    if dtype is None:
        raise ValueError(f"{info.name} has dtype {info.dtype!r}; known are {', '.join(_TORCH_DTYPES)}")
    shape = tuple(info.shape)
    num_elements = 1
    for size in shape:
        num_elements *= size
    if num_elements * dtype.itemsize != info.num_bytes:
        raise ValueError(f"{info.name} has {info.num_bytes} bytes, which is not shape {shape} of {info.dtype}")
    if num_elements == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=num_elements, offset=first).view(shape)


# safetensors' names.
_TORCH_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
