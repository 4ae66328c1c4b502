"""A version as a relay puts it together: from data as it is, from differences to a base it holds, and from what both
versions have in common. Blocking, for one thread.
"""

from collections.abc import Sequence

from streamrl.delta_codec import decode_delta
from streamrl.dtypes import ITEM_BYTES
from streamrl.errors import WeightTransferError
from streamrl.rpc.chunks import FetchedChunk, cut
from streamrl.v1.weights_pb2 import CHUNK_ENCODING_UNSPECIFIED
from streamrl.weight_pairs import Pair, pair_tensors
from weights_svc.incoming import IncomingVersion
from weights_svc.store import StoredVersion, VersionReader

_COPY_BYTES = 1024 * 1024


class Assembly:
    """Fills an incoming version from one stream. Close it at the stream's end; the next one may go on."""

    def __init__(self, incoming: IncomingVersion, target: StoredVersion, base: StoredVersion | None) -> None:
        """
        Args:
            target: the manifest of what is coming.
            base: what the stream's differences are to; None: everything comes as it is.
        """
        self._incoming = incoming
        self._tensors = target.manifest.tensors
        self._pairs: Sequence[Pair] | None = None
        self._base: VersionReader | None = None
        if base is not None:
            self._pairs = pair_tensors(base.manifest, target.manifest)
            self._base = VersionReader(base)

    def write(self, chunks: Sequence[FetchedChunk]) -> None:
        """Takes the next chunks of the stream.

        Raises:
            ValueError: one is not the chunk that comes next.
            WeightTransferError: data was damaged on its way, or the base is; the incoming version goes on from its
                last good tensor.
        """
        for chunk in chunks:
            self._copy_same(chunk.stretch.tensor_index)
            self._incoming.write([(chunk.stretch, memoryview(self._data(chunk)))])

    def finish(self) -> None:
        """The stream has ended: what is left is in the base, if the stream was whole.

        Raises:
            WeightTransferError: the base is damaged.
        """
        self._copy_same(len(self._tensors))

    def close(self) -> None:
        if self._base is not None:
            self._base.close()

    def _data(self, chunk: FetchedChunk) -> bytes | memoryview:
        stretch = chunk.stretch
        if chunk.encoding == CHUNK_ENCODING_UNSPECIFIED:
            if len(chunk.data) != stretch.num_bytes:
                raise WeightTransferError(f"a chunk of {stretch.num_bytes} bytes came with {len(chunk.data)}")
            return chunk.data
        in_range = 0 <= stretch.tensor_index < len(self._tensors)
        base_index = self._pairs[stretch.tensor_index].base_index if self._pairs is not None and in_range else None
        if base_index is None or self._base is None:
            raise WeightTransferError(f"a difference came for tensor {stretch.tensor_index}, which has no base")
        tensor = self._tensors[stretch.tensor_index]
        if stretch.offset < 0 or not 0 < stretch.num_bytes <= tensor.num_bytes - stretch.offset:
            raise WeightTransferError(f"a difference came that reaches over the end of {tensor.name}")
        base = self._base.read(stretch._replace(tensor_index=base_index))
        return decode_delta(chunk.encoding, chunk.data, base, stretch.num_bytes, ITEM_BYTES[tensor.dtype])

    def _copy_same(self, before: int) -> None:
        """Takes tensors that are the same from the base, up to the next that is not or to a given one."""
        incoming = self._incoming
        while (index := incoming.next_tensor_index) < before and self._pairs is not None and self._base is not None:
            base_index = self._pairs[index].base_index
            if not self._pairs[index].same or base_index is None:
                return
            for stretch in cut([self._tensors[index].num_bytes], _COPY_BYTES, 0, incoming.next_offset):
                data = self._base.read(stretch._replace(tensor_index=base_index))
                incoming.write([(stretch._replace(tensor_index=index), memoryview(data))])
