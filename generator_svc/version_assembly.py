"""Puts what is fetched of a version into its buffer: data as it is, or what differs from a base that is kept.

Chunks come in order. Every tensor is compared with its digest as soon as it is full.
"""

from typing import TYPE_CHECKING

from generator_svc.version_buffer import VersionBuffer
from streamrl.delta_codec import decode_delta
from streamrl.digest import new_digest
from streamrl.dtypes import ITEM_BYTES
from streamrl.errors import WeightTransferError
from streamrl.rpc.chunks import FetchedChunk
from streamrl.v1.weights_pb2 import CHUNK_ENCODING_UNSPECIFIED
from streamrl.weight_pairs import pair_tensors

if TYPE_CHECKING:
    from blake3 import blake3


class VersionAssembly:
    """Knows which byte comes next. For one thread."""

    def __init__(self, buffer: VersionBuffer, base: VersionBuffer | None = None) -> None:
        """
        Args:
            base: what differences are to.
        """
        self._buffer = buffer
        self._base = base
        self._tensors = buffer.manifest.tensors
        self._pairs = None if base is None else pair_tensors(base.manifest, buffer.manifest)
        self.tensor_index = 0
        self.offset = 0
        self._digest: blake3 = new_digest()
        self._end_tensors()

    @property
    def complete(self) -> bool:
        return self.tensor_index == len(self._tensors)

    def add(self, chunk: FetchedChunk) -> None:
        """
        Raises:
            WeightTransferError: not the chunk that comes next, one that cannot be decoded, or one that completes a
                tensor whose digest disagrees.
        """
        stretch = chunk.stretch
        if stretch.tensor_index > self.tensor_index:
            self._copy_same(stretch.tensor_index)
        if (
            (stretch.tensor_index, stretch.offset) != (self.tensor_index, self.offset)
            or self.complete
            or self.offset + stretch.num_bytes > self._tensors[self.tensor_index].num_bytes
        ):
            raise WeightTransferError(
                f"{stretch.num_bytes} bytes came for tensor {stretch.tensor_index} at {stretch.offset}; "
                f"expected tensor {self.tensor_index} at {self.offset}"
            )
        self._put(self._data(chunk))

    def finish_difference(self) -> None:
        """The stream of a difference has ended: what is left is the same in the base, if the stream was whole.

        Raises:
            WeightTransferError: it is not.
        """
        self._copy_same(len(self._tensors))

    def take_tensor_again(self) -> None:
        """The current tensor comes anew, from its beginning."""
        self.offset = 0
        self._digest = new_digest()

    def _data(self, chunk: FetchedChunk) -> bytes | memoryview:
        index, offset, num_bytes = chunk.stretch
        if chunk.encoding == CHUNK_ENCODING_UNSPECIFIED:
            if len(chunk.data) != num_bytes:
                raise WeightTransferError(f"a chunk of {num_bytes} bytes came with {len(chunk.data)}")
            return chunk.data
        base_index = None if self._pairs is None else self._pairs[index].base_index
        if self._base is None or base_index is None:
            raise WeightTransferError(f"a difference came for {self._tensors[index].name}, which has no base")
        with self._base.tensor_bytes(base_index) as base:
            item_bytes = ITEM_BYTES[self._tensors[index].dtype]
            return decode_delta(
                chunk.encoding, chunk.data, bytes(base[offset : offset + num_bytes]), num_bytes, item_bytes
            )

    def _copy_same(self, before: int) -> None:
        """Takes tensors that are the same in the base, up to the next that is not or to a given one."""
        while self.tensor_index < before and self._base is not None and self._pairs is not None:
            pair = self._pairs[self.tensor_index]
            if not pair.same or pair.base_index is None:
                return
            with self._base.tensor_bytes(pair.base_index) as base, base[self.offset :] as rest:
                self._put(rest)

    def _put(self, data: bytes | memoryview) -> None:
        self._buffer.write(self.tensor_index, self.offset, data)
        self._digest.update(data)
        self.offset += len(data)
        self._end_tensors()

    def _end_tensors(self) -> None:
        """Closes the current tensor when it is full, and empty ones behind it."""
        while not self.complete and self.offset == self._tensors[self.tensor_index].num_bytes:
            expected = self._tensors[self.tensor_index]
            if self._digest.hexdigest() != expected.digest:
                raise WeightTransferError(
                    f"{expected.name} arrived with digest {self._digest.hexdigest()} instead of {expected.digest}"
                )
            self.tensor_index += 1
            self.offset = 0
            self._digest = new_digest()
