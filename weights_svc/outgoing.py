"""What one fetch sends: the stretches of a version in order, as they are or as differences to a base.

Disk reads and differences block: they are for a thread. A version that is still arriving is sent as far as it has come.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from streamrl.delta_codec import encode_delta
from streamrl.dtypes import ITEM_BYTES
from streamrl.errors import UnavailableError, WeightTransferError
from streamrl.rpc.chunks import FetchedChunk, Stretch, cut, encode_fetch_response, encode_fetched_chunk
from streamrl.v1.weights_pb2 import VersionManifest
from streamrl.weight_pairs import Pair, pair_tensors
from weights_svc.arrivals import Arrival
from weights_svc.store import StoredVersion, VersionReader

_BATCH_BYTES = 1024 * 1024
"""Chunks go to a thread together until they are this large: a model may have thousands of tiny tensors."""


class Position(NamedTuple):
    """Where a fetch begins, or before which byte it ends."""

    tensor_index: int
    offset: int


class Response(NamedTuple):
    """One message of a fetch."""

    message: bytes
    """Serialised."""
    bytes_full: int
    """Bytes of the version that it stands for."""
    bytes_sent: int


class Outgoing:
    """One version on its way out. Belongs to one event loop."""

    def __init__(
        self,
        stored: StoredVersion,
        *,
        base: StoredVersion | None = None,
        arrival: Arrival | None = None,
        end: Position | None = None,
        chunk_bytes: int,
    ) -> None:
        """
        Args:
            base: send differences to this version.
            arrival: the version is still arriving.
            end: send what lies before; None: up to the end of the version.
        """
        self._stored = stored
        self._base = base
        self._arrival = arrival
        self._end = end
        self._chunk_bytes = chunk_bytes
        self._pairs = None if base is None else pair_tensors(base.manifest, stored.manifest)

    def bytes_left_out(self, first: Position) -> int:
        """Of tensors that the receiver has already, and that begin between `first` and the end."""
        if self._pairs is None:
            return 0
        return sum(
            tensor.num_bytes
            for index, (tensor, pair) in enumerate(zip(self._stored.manifest.tensors, self._pairs, strict=True))
            if pair.same and (index, 0) >= first and self._lies_before_end(index, 0)
        )

    async def responses(self, first: Position) -> AsyncIterator[Response]:
        """What to send, from a position on: the next batch is read while one is sent.

        Raises:
            UnavailableError: the version is still arriving, and will not arrive whole.
            WeightTransferError: the data is damaged on disk.
        """
        loop = asyncio.get_running_loop()
        coming = _Coming(self._stretches(first), self._arrival)
        reader = self._open()
        # One thread, so that the files are closed behind the last read, also when the receiver has gone.
        thread = ThreadPoolExecutor(1, thread_name_prefix=f"fetch-{self._stored.weight_version}")
        try:
            while await coming.wait():
                reading: asyncio.Future[list[Response]] | None
                reading = loop.run_in_executor(thread, reader.read, coming.take())
                while reading is not None:
                    responses = await reading
                    batch = coming.take()
                    reading = loop.run_in_executor(thread, reader.read, batch) if batch else None
                    for response in responses:
                        yield response
        finally:
            thread.submit(reader.close)
            thread.shutdown(wait=False)

    def _open(self) -> "_FullReader | _DeltaReader":
        try:
            if self._base is None or self._pairs is None:
                return _FullReader(self._stored)
            return _DeltaReader(self._base, self._stored, self._pairs)
        except WeightTransferError as error:
            if self._arrival is None:
                raise
            raise UnavailableError(f"{error}: it has just arrived; negotiate again") from error

    def _stretches(self, first: Position) -> Iterator[Stretch]:
        tensor_bytes = [tensor.num_bytes for tensor in self._stored.manifest.tensors]
        for stretch in cut(tensor_bytes, self._chunk_bytes, *first):
            index, offset, num_bytes = stretch
            if not self._lies_before_end(index, offset):
                return
            if self._pairs is not None and self._pairs[index].same:
                continue
            if self._end is not None and index == self._end.tensor_index:
                num_bytes = min(num_bytes, self._end.offset - offset)
            yield Stretch(index, offset, num_bytes)

    def _lies_before_end(self, tensor_index: int, offset: int) -> bool:
        return self._end is None or (tensor_index, offset) < self._end


class _Coming:
    """The stretches that are still to be sent."""

    def __init__(self, stretches: Iterator[Stretch], arrival: Arrival | None) -> None:
        self._stretches = stretches
        self._arrival = arrival
        self._next = next(stretches, None)

    async def wait(self) -> bool:
        """Waits until one can be sent; False when there are none left.

        Raises:
            UnavailableError: the rest will not arrive.
        """
        if self._next is not None and self._arrival is not None:
            await self._arrival.wait_for(self._next.tensor_index)
        return self._next is not None

    def take(self) -> list[Stretch]:
        """Those that can be sent now, up to `_BATCH_BYTES` or a little more."""
        batch: list[Stretch] = []
        batch_bytes = 0
        while self._next is not None and batch_bytes < _BATCH_BYTES and self._is_here(self._next):
            batch.append(self._next)
            batch_bytes += self._next.num_bytes
            self._next = next(self._stretches, None)
        return batch

    def _is_here(self, stretch: Stretch) -> bool:
        return self._arrival is None or self._arrival.has(stretch.tensor_index)


def lies_inside(manifest: VersionManifest, first: Position) -> bool:
    """Whether a position lies inside a version."""
    tensors = manifest.tensors
    num_bytes = tensors[first.tensor_index].num_bytes if 0 <= first.tensor_index < len(tensors) else 0
    return 0 <= first.tensor_index <= len(tensors) and 0 <= first.offset <= num_bytes


class _FullReader:
    """Data as it is. For one thread."""

    def __init__(self, stored: StoredVersion) -> None:
        self._reader = VersionReader(stored)

    def read(self, batch: Sequence[Stretch]) -> list[Response]:
        return [
            Response(encode_fetch_response(stretch, self._reader.read(stretch)), stretch.num_bytes, stretch.num_bytes)
            for stretch in batch
        ]

    def close(self) -> None:
        self._reader.close()


class _DeltaReader:
    """Differences of two versions. For one thread."""

    def __init__(self, base: StoredVersion, target: StoredVersion, pairs: Sequence[Pair]) -> None:
        self._base = VersionReader(base)
        try:
            self._target = VersionReader(target)
        except BaseException:
            self._base.close()
            raise
        self._tensors = target.manifest.tensors
        self._pairs = pairs

    def read(self, batch: Sequence[Stretch]) -> list[Response]:
        return [self._response(stretch) for stretch in batch]

    def close(self) -> None:
        self._base.close()
        self._target.close()

    def _response(self, stretch: Stretch) -> Response:
        data = self._target.read(stretch)
        base_index = self._pairs[stretch.tensor_index].base_index
        if base_index is None:
            return Response(encode_fetch_response(stretch, data), stretch.num_bytes, stretch.num_bytes)
        base_data = self._base.read(stretch._replace(tensor_index=base_index))
        item_bytes = ITEM_BYTES[self._tensors[stretch.tensor_index].dtype]
        encoding, difference = encode_delta(base_data, data, item_bytes)
        message = encode_fetched_chunk(FetchedChunk(stretch, encoding, difference))
        return Response(message, stretch.num_bytes, len(difference))
