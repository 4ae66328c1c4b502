"""Which tensors two weight versions have in common: what a difference between them can rest on.

Sender and receiver of a difference find the same pairs, each from the two manifests. A tensor that only the new version
has (another layout, an adapter that came) goes whole; one that only the old version has is forgotten.
"""

from dataclasses import dataclass

from streamrl.v1.weights_pb2 import TensorInfo, VersionManifest


def comparable(base: VersionManifest, target: VersionManifest) -> bool:
    """Whether a difference between the two means anything: both are weights, or adapters of the same base."""
    return base.adapter.base_digest == target.adapter.base_digest


@dataclass(frozen=True, slots=True)
class Pair:
    """One tensor of the new version, and its namesake in the old one."""

    base_index: int | None
    """Its place there; None when there is none of this name, dtype and shape."""
    same: bool
    """The two have one digest: there is nothing to send."""


def pair_tensors(base: VersionManifest, target: VersionManifest) -> list[Pair]:
    """One pair for each tensor of `target`, in its order."""
    places = {tensor.name: index for index, tensor in enumerate(base.tensors)}
    pairs = []
    for tensor in target.tensors:
        index = places.get(tensor.name)
        if index is None or not _alike(base.tensors[index], tensor):
            pairs.append(Pair(None, False))
        else:
            pairs.append(Pair(index, base.tensors[index].digest == tensor.digest))
    return pairs


def differing_bytes(base: VersionManifest, target: VersionManifest) -> int:
    """Bytes of the tensors of `target` that are not the same in `base`."""
    pairs = zip(pair_tensors(base, target), target.tensors, strict=True)
    return sum(tensor.num_bytes for pair, tensor in pairs if not pair.same)


def _alike(one: TensorInfo, other: TensorInfo) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.num_bytes == other.num_bytes
