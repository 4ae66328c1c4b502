"""What weights_svc does on its own: verifies what an earlier life left, flushes what was announced, retires what nobody
needs. It sleeps until one of these is due.
"""

import asyncio
import logging
import time
from collections.abc import Iterable

from streamrl.errors import WeightTransferError
from weights_svc.announcements import Announcements
from weights_svc.receivers import Receivers
from weights_svc.retention import retired
from weights_svc.store import StoredVersion, VersionStore

logger = logging.getLogger(__name__)


class RetentionLoop:
    """Belongs to one event loop."""

    def __init__(
        self, store: VersionStore, receivers: Receivers, announcements: Announcements, *, keep_versions: int
    ) -> None:
        self._store = store
        self._receivers = receivers
        self._announcements = announcements
        self._keep_versions = keep_versions
        self._unflushed: list[StoredVersion] = []
        self._suspects: list[StoredVersion] = []
        self._due = asyncio.Event()
        self.recovered = asyncio.Event()
        """Set when everything that was found on disk has been verified or dropped."""

    def committed(self, stored: StoredVersion) -> None:
        """A version was committed: flush it, and see whether others may go."""
        self._unflushed.append(stored)
        self._due.set()

    def look(self) -> None:
        """A receiver is done with a version: see whether it may go."""
        self._due.set()

    def suspect(self, stored: StoredVersion) -> None:
        """Something that rests on this version came out wrong: see whether it is damaged."""
        if stored not in self._suspects:
            self._suspects.append(stored)
            self._due.set()

    async def run(self, found: Iterable[StoredVersion]) -> None:
        """Runs until cancelled.

        Args:
            found: versions on disk that were not verified yet, newest first.

        Raises:
            OSError: the disk failed.
        """
        for stored in found:
            await self._recover(stored)
        self.recovered.set()
        while True:
            self._due.clear()
            await self._retire()
            if self._suspects:
                await self._inspect(self._suspects.pop(0))
            elif self._unflushed:
                await asyncio.to_thread(self._store.flush, self._unflushed.pop(0))
            else:
                await self._wait()

    async def drop(self, stored: StoredVersion, reason: WeightTransferError) -> None:
        """Takes a damaged version out of the store."""
        logger.error("version=%d is dropped: %s", stored.weight_version, reason)
        self._store.withdraw(stored)
        self._receivers.forget_version(stored.weight_version)
        await asyncio.to_thread(self._store.delete, [stored])

    async def _recover(self, stored: StoredVersion) -> None:
        try:
            await asyncio.to_thread(self._store.verify, stored)
        except WeightTransferError as error:
            await self.drop(stored, error)
            return
        self._store.add(stored)
        logger.info("version=%d was on disk, whole and undamaged", stored.weight_version)
        if self._store.newest is stored:
            self._announcements.announce(stored.manifest)

    async def _inspect(self, stored: StoredVersion) -> None:
        if self._store.versions.get(stored.weight_version) is not stored:
            return
        try:
            await asyncio.to_thread(self._store.verify, stored)
        except WeightTransferError as error:
            await self.drop(stored, error)

    async def _retire(self) -> None:
        now_s = time.monotonic()
        versions = self._store.versions
        bases = {version for version, stored in versions.items() if stored.manifest.is_base}
        in_use = self._receivers.in_use(now_s)
        gone = [versions[version] for version in retired(versions.keys(), self._keep_versions, in_use, bases)]
        for stored in gone:
            self._store.withdraw(stored)
            self._receivers.forget_version(stored.weight_version)
            logger.info("version=%d is retired", stored.weight_version)
        await asyncio.to_thread(self._store.delete, gone)

    async def _wait(self) -> None:
        """Until something is due; when more versions are kept than need be, until the next may go."""
        now_s = time.monotonic()
        lapse_s = self._receivers.next_lapse_s(now_s) if len(self._store.versions) > self._keep_versions else None
        try:
            async with asyncio.timeout(None if lapse_s is None else lapse_s - now_s):
                await self._due.wait()
        except TimeoutError:
            pass  # an expected fetch did not come
