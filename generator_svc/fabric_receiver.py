"""An instance's place on a fabric: versions that weights_svc sends to all instances at once land in host memory here.

One place an instance, however many workers its engine has: they map that memory and each takes its share. So a version
comes beside generation and not in a pause that would have to be everybody's, and nothing is loaded before it agrees
with its digests.
"""

import threading

from generator_svc.version_buffer import VersionBuffer, tensor_offsets
from streamrl.digest import bytes_digest
from streamrl.errors import FabricError
from streamrl.fabric.member import MAX_FAILURES, FabricMember
from streamrl.fabric.regions import tensor_regions
from streamrl.v1.weights_pb2 import FabricGroup, VersionManifest


class FabricReceiver:
    """One receive at a time. `start` and `close` are for the main thread."""

    def __init__(self, member: FabricMember | None = None) -> None:
        """
        Args:
            member: tests have a network of their own.
        """
        self._member = FabricMember() if member is None else member
        self.failed_group = b""
        """The unique id of the group that failed last, or was not wanted any more: others may wait there."""
        self._num_failures = 0
        self._lock = threading.Lock()
        self._receiving: VersionManifest | None = None

    @property
    def ready(self) -> bool:
        """Whether this instance can join a group."""
        return self._member.ready and self._receiving is None

    @property
    def group(self) -> bytes:
        """The unique id of the group that this instance is in; empty: none."""
        return self._member.group

    def start(self) -> None:
        """Makes it ready in some seconds. Not after `MAX_FAILURES` groups in a row that failed."""
        if self._num_failures < MAX_FAILURES:
            self._member.start()

    def receive(self, group: FabricGroup, buffer: VersionBuffer, cancelled: threading.Event) -> None:
        """Fills the buffer in this place of a group.

        Args:
            cancelled: set by who then calls `cancel`.

        Raises:
            FabricError: cancelled, the group did not meet, it broke off, or something came damaged. The place is lost
                then, and what is in the buffer means nothing.
        """
        manifest = buffer.manifest
        offsets, _ = tensor_offsets(manifest)
        with self._lock:
            self._receiving = manifest
            self.failed_group = group.unique_id
            try:
                if cancelled.is_set():
                    raise FabricError("it is not wanted any more")
                self._member.join(group.unique_id, group.rank, group.world_size)
                self._member.move(buffer.path, tensor_regions(manifest, offsets))
                _check(buffer)
            except FabricError:
                if not cancelled.is_set():
                    self._num_failures += 1
                self._member.kill()
                raise
            finally:
                self._receiving = None
        self._num_failures = 0
        self.failed_group = b""

    def cancel(self, manifest: VersionManifest) -> None:
        """Makes `receive` of this version raise, if it is on its way. From any thread."""
        if self._receiving is manifest:
            self._member.kill()

    def close(self) -> None:
        """Gives the place up."""
        self._member.kill()


def _check(buffer: VersionBuffer) -> None:
    for index, tensor in enumerate(buffer.manifest.tensors):
        with buffer.tensor_bytes(index) as data:
            digest = bytes_digest(data)
        if digest != tensor.digest:
            raise FabricError(f"{tensor.name} arrived with digest {digest} instead of {tensor.digest}")
