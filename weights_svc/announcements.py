"""Tells every watcher of each version that is announced, in order and without loss."""

import asyncio
from collections.abc import AsyncIterator

from streamrl.errors import UnavailableError
from streamrl.v1.weights_pb2 import VersionManifest, WatchResponse


class Announcements:
    """The watchers of this service. Belongs to one event loop."""

    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[WatchResponse | None]] = set()
        self._closed = False

    def announce(self, manifest: VersionManifest) -> None:
        for queue in self._queues:
            queue.put_nowait(_announcement(manifest))

    async def watch(self, newest: VersionManifest | None) -> AsyncIterator[WatchResponse]:
        """The newest version as it is now, if any, then each later announcement.

        Raises:
            UnavailableError: the service ends.
        """
        queue: asyncio.Queue[WatchResponse | None] = asyncio.Queue()
        if newest is not None:
            queue.put_nowait(_announcement(newest))
        self._queues.add(queue)
        try:
            while not self._closed:
                announcement = await queue.get()
                if announcement is not None:
                    yield announcement
        finally:
            self._queues.discard(queue)
        raise UnavailableError("weights_svc is ending")

    def close(self) -> None:
        """Ends every watch at once."""
        self._closed = True
        for queue in self._queues:
            queue.put_nowait(None)


def _announcement(manifest: VersionManifest) -> WatchResponse:
    return WatchResponse(weight_version=manifest.weight_version, digest=manifest.digest, attempt=manifest.attempt)
