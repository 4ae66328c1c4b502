"""Digests of weight versions, the same at every place that makes or checks one."""

from collections.abc import Iterable

from blake3 import blake3

from streamrl.v1.weights_pb2 import Adapter, ModelFile, TensorInfo

_NOT_TOKENIZER = frozenset({"config.json", "generation_config.json"})


def new_digest() -> "blake3":
    """An incremental digest of raw bytes: `.update(buffer)`, `.hexdigest()`."""
    return blake3()


def bytes_digest(data: bytes | memoryview) -> str:
    """BLAKE3 of the data, hex."""
    return blake3(data).hexdigest()


def version_digest(tensors: Iterable[TensorInfo], adapter: Adapter | None = None) -> str:
    """BLAKE3, hex, over names, dtypes, shapes and digests of the tensors in their order.

    Args:
        adapter: what is added to a base, if the tensors are; an empty message stands for none. The digest covers it
            too: the same adapters on another base are other weights.
    """
    digest = blake3()
    for tensor in tensors:
        shape = ",".join(str(size) for size in tensor.shape)
        digest.update(f"{tensor.name}\0{tensor.dtype}\0{shape}\0{tensor.digest}\n".encode())
    if adapter is not None and adapter.base_digest:
        digest.update(f"\0adapter\0{adapter.base_digest}\0{adapter.scaling.hex()}\n".encode())
    return digest.hexdigest()


def tokenizer_digest(files: Iterable[ModelFile]) -> str:
    """BLAKE3, hex, over names and contents of the files of a model that make its tokenizer; empty when none do.

    Args:
        files: those that come with version 0, in any order; the model's own configs are left out.
    """
    digest, num_files = blake3(), 0
    for file in sorted(files, key=lambda file: file.name):
        if file.name not in _NOT_TOKENIZER:
            digest.update(f"{file.name}\0{bytes_digest(file.content)}\n".encode())
            num_files += 1
    return digest.hexdigest() if num_files else ""
