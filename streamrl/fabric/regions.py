"""Cuts tensors that lie anywhere in a file into the blocks in which all members of a group move them.

Both ends cut alike, because blocks follow from the sizes of the tensors alone; where these lie is each member's affair.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from streamrl.v1.weights_pb2 import VersionManifest


class Region(NamedTuple):
    """A stretch of a file."""

    offset: int
    num_bytes: int


def tensor_regions(manifest: VersionManifest, offsets: Iterable[int]) -> list[Region]:
    """A version's tensors in a file where they begin at these offsets."""
    return [Region(offset, tensor.num_bytes) for offset, tensor in zip(offsets, manifest.tensors, strict=True)]


def blocks(regions: Sequence[Region], block_bytes: int) -> Iterator[list[Region]]:
    """The regions' bytes in order, in blocks of `block_bytes` (the last one may be smaller; none is empty), each as the
    regions that make it up: small tensors share a block, and a large one is spread over several."""
    block: list[Region] = []
    room = block_bytes
    for offset, num_bytes in regions:
        taken = 0
        while taken < num_bytes:
            piece = Region(offset + taken, min(room, num_bytes - taken))
            block.append(piece)
            taken += piece.num_bytes
            room -= piece.num_bytes
            if room == 0:
                yield block
                block, room = [], block_bytes
    if block:
        yield block
