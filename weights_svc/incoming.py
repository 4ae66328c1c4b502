"""One version while it arrives: checks the order of its chunks, writes and digests them, and compares with the footer.

Constant memory: nothing of the data is kept. The file is a partial one until the store commits it. The methods that
touch the disk block; they are for one thread.
"""

import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from streamrl.digest import new_digest, version_digest
from streamrl.errors import RefusedError, WeightTransferError
from streamrl.rpc.chunks import Stretch
from streamrl.v1.weights_pb2 import PublishFooter, PublishHeader, VersionManifest
from weights_svc.layout import lay_out

PARTIAL_SUFFIX = ".partial"
"""Of files that are not committed; what a killed service leaves of them is removed at the next start."""


class NoRoomError(RefusedError):
    """The disk has no room for a version; it may have later."""


class ChunkOrder:
    """Accepts the chunks of a version's tensors in order, without gaps or overlaps, and nothing else."""

    def __init__(self, tensor_bytes: Sequence[int]) -> None:
        self._tensor_bytes = tensor_bytes
        self.tensor_index = 0
        """The tensor whose data comes next."""
        self.offset = 0
        """The byte of it that comes next."""

    @property
    def complete(self) -> bool:
        """All data has come."""
        return self.tensor_index == len(self._tensor_bytes)

    @property
    def at_tensor_end(self) -> bool:
        """The current tensor's data has come, or it has none."""
        return not self.complete and self.offset == self._tensor_bytes[self.tensor_index]

    def accept(self, stretch: Stretch) -> None:
        """Takes note of a chunk.

        Raises:
            ValueError: it is not the one that comes next.
        """
        fits = (
            not self.complete
            and (stretch.tensor_index, stretch.offset) == (self.tensor_index, self.offset)
            and 0 < stretch.num_bytes <= self._tensor_bytes[self.tensor_index] - self.offset
        )
        if not fits:
            raise ValueError(
                f"{stretch.num_bytes} bytes came for tensor {stretch.tensor_index} at {stretch.offset}: expected those "
                f"of tensor {self.tensor_index} of {len(self._tensor_bytes)} at {self.offset}"
            )
        self.offset += stretch.num_bytes

    def next_tensor(self) -> None:
        """Goes on behind a tensor that has ended."""
        assert self.at_tensor_end
        self.tensor_index += 1
        self.offset = 0

    def again(self) -> None:
        """Goes back to the beginning of the current tensor."""
        self.offset = 0


class IncomingVersion:
    """Call `open`, then `write` for all data, then `finish`; `close` in any case."""

    def __init__(self, header: PublishHeader, folder: Path, expected_digests: Sequence[str] | None = None) -> None:
        """
        Args:
            expected_digests: of the tensors, where they are known before the data: each is compared as soon as its
                tensor has come.

        Raises:
            ValueError: the header names no legal version.
        """
        if header.weight_version < 0:
            raise ValueError(f"weight version {header.weight_version}: expected 0 or more")
        self.header = header
        self._folder = folder
        self._layout = lay_out(header.tensors)
        self._order = ChunkOrder([tensor.num_bytes for tensor in header.tensors])
        self._digest = new_digest()
        self._digests: list[str] = []
        self._expected_digests = expected_digests
        self._file = -1
        self.path: Path | None = None
        """The partial file; whoever moves it sets this to None."""

    @property
    def next_tensor_index(self) -> int:
        """The tensor whose data comes next; those before it have come whole, with the digests that were expected."""
        return self._order.tensor_index

    @property
    def next_offset(self) -> int:
        """The byte of it that comes next."""
        return self._order.offset

    @property
    def complete(self) -> bool:
        """All data has come."""
        return self._order.complete

    def open(self) -> None:
        """Begins the file.

        Raises:
            NoRoomError: the disk has no room for it.
        """
        free_bytes = shutil.disk_usage(self._folder).free
        if free_bytes < self._layout.num_bytes:
            raise NoRoomError(
                f"version {self.header.weight_version} needs {self._layout.num_bytes} bytes and {self._folder} has "
                f"{free_bytes} free: make room, or lower weights.keep_versions"
            )
        self._file, path = tempfile.mkstemp(
            prefix=f"version-{self.header.weight_version:08d}-", suffix=PARTIAL_SUFFIX, dir=self._folder
        )
        self.path = Path(path)
        _write_at(self._file, self._layout.header, 0)
        os.ftruncate(self._file, self._layout.num_bytes)
        self._end_tensors()

    def write(self, chunks: Iterable[tuple[Stretch, memoryview]]) -> None:
        """Takes the next chunks.

        Raises:
            ValueError: one is not the chunk that comes next.
            WeightTransferError: it completes a tensor that has another digest than expected; that tensor's data then
                has to come again, from its beginning.
        """
        for stretch, data in chunks:
            self._order.accept(stretch)
            _write_at(self._file, data, self._layout.positions[stretch.tensor_index] + stretch.offset)
            self._digest.update(data)
            self._end_tensors()

    def finish(self, footer: PublishFooter) -> VersionManifest:
        """The manifest of the version, which has come whole.

        Raises:
            ValueError: data is missing.
            WeightTransferError: the data differs from what the publisher sent.
        """
        header = self.header
        if not self._order.complete:
            raise ValueError(
                f"version {header.weight_version} ended at tensor {self._order.tensor_index} of {len(header.tensors)}, "
                f"byte {self._order.offset}: it is not announced"
            )
        if len(footer.digests) != len(self._digests):
            raise ValueError(f"{len(footer.digests)} digests came for {len(self._digests)} tensors: expected one each")
        manifest = VersionManifest(
            weight_version=header.weight_version,
            attempt=header.attempt,
            tensors=header.tensors,
            canaries=header.canaries,
            num_bytes=sum(tensor.num_bytes for tensor in header.tensors),
            adapter=header.adapter if header.HasField("adapter") else None,
            is_base=header.is_base,
        )
        for tensor, digest, sent in zip(manifest.tensors, self._digests, footer.digests, strict=True):
            if digest != sent:
                raise WeightTransferError(
                    f"{tensor.name} of version {header.weight_version} was sent with digest {sent} and arrived with "
                    f"{digest}"
                )
            tensor.digest = digest
        manifest.digest = version_digest(manifest.tensors, manifest.adapter)
        return manifest

    def close(self) -> None:
        """Ends the work on the file, and removes it when it is still partial."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self.path is not None:
            self.path.unlink()
            self.path = None

    def _end_tensors(self) -> None:
        """Closes the current tensor when it has ended, and empty ones behind it."""
        while self._order.at_tensor_end:
            digest, self._digest = self._digest.hexdigest(), new_digest()
            index = self._order.tensor_index
            if self._expected_digests is not None and digest != self._expected_digests[index]:
                self._order.again()
                raise WeightTransferError(
                    f"{self.header.tensors[index].name} of version {self.header.weight_version} arrived with digest "
                    f"{digest} instead of {self._expected_digests[index]}"
                )
            self._digests.append(digest)
            self._order.next_tensor()


def _write_at(file: int, data: bytes | memoryview, position: int) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(file, rest, position)
        rest, position = rest[written:], position + written
