"""What a relay does on its own: follows what its upstream announces, takes each version once however many receivers it
has, and passes on what they acknowledge.

The upstream is the authority: what it forgets is forgotten here, and what an attempt has replaced is replaced here.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable

from streamrl.errors import RefusedError, StreamRLError, UnavailableError, WeightTransferError
from streamrl.v1.weights_pb2 import AcknowledgeRequest, Adapter, WatchResponse
from weights_svc.announcements import Announcements
from weights_svc.arrivals import Arrivals
from weights_svc.incoming import NoRoomError
from weights_svc.ledger import Ledger
from weights_svc.pacing import Pacer
from weights_svc.receivers import Receivers
from weights_svc.retention_loop import RetentionLoop
from weights_svc.store import StoredVersion, VersionStore
from weights_svc.transfer import Transfer
from weights_svc.upstream import Upstream

logger = logging.getLogger(__name__)

_PAUSE_S = 1.0
_REFUSED_PAUSE_S = 10.0
"""A version that cannot be had is asked for again after this, or when a newer one is announced: a full disk may have
room again, and in a run that waits for just this version no other would be announced."""
_BEGIN_PATIENCE_S = 10.0
"""For so long a receiver that asks for a version that is not here waits for the upstream's answer, before it is told to
ask again."""


class RelayLoop:
    """Belongs to one event loop."""

    def __init__(
        self,
        upstream: Upstream,
        store: VersionStore,
        ledger: Ledger,
        receivers: Receivers,
        announcements: Announcements,
        arrivals: Arrivals,
        retention: RetentionLoop,
        pacer: Pacer,
    ) -> None:
        self._upstream = upstream
        self._store = store
        self._ledger = ledger
        self._receivers = receivers
        self._announcements = announcements
        self._arrivals = arrivals
        self._retention = retention
        self._pacer = pacer
        self._newest: WatchResponse | None = None
        self._due = asyncio.Event()
        self._transfers: dict[int, tuple[Transfer, asyncio.Task[StoredVersion]]] = {}
        self._files_attempt = 0
        self._acknowledgements: dict[str, AcknowledgeRequest] = {}
        self._acknowledged = asyncio.Event()

    async def run(self) -> None:
        """Runs until cancelled.

        Raises:
            RefusedError: the upstream does not let this relay watch, or keeps another run's weights.
            OSError: the disk failed.
        """
        await self._retention.recovered.wait()
        tasks = [asyncio.create_task(work) for work in (self._watch(), self._follow(), self._pass_on())]
        try:
            await asyncio.gather(*tasks)
        finally:
            transfers = [task for _transfer, task in self._transfers.values()]
            for task in (*tasks, *transfers):
                task.cancel()
            await asyncio.gather(*tasks, *transfers, return_exceptions=True)

    async def bring(self, weight_version: int) -> None:
        """Returns when a version that a receiver asks for is here, or begins to arrive.

        Raises:
            RefusedError: the upstream does not hold it.
            UnavailableError: the upstream does not answer now, or the disk here is full.
            WeightTransferError: it came damaged again and again.
        """
        transfer, task = self._begin(weight_version)
        begun = asyncio.create_task(transfer.begun.wait())
        try:
            await asyncio.wait({begun, task}, timeout=_BEGIN_PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            begun.cancel()
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, NoRoomError):
                # To a receiver a refusal would say that the version is gone.
                raise UnavailableError(str(error)) from error
            raise error
        if not transfer.begun.is_set():
            raise UnavailableError(f"version {weight_version} has to come from {self._upstream.name} first")

    def lost(self) -> None:
        """A version was dropped as damaged: see whether it has to come again."""
        self._due.set()

    def acknowledged(self, request: AcknowledgeRequest) -> None:
        """Passes on what a receiver has loaded: the trainer reads it at the origin."""
        self._acknowledgements[request.receiver] = request
        self._acknowledged.set()

    async def _watch(self) -> None:
        while True:
            try:
                async for announcement in self._upstream.watch():
                    self._heard(announcement)
            except UnavailableError as error:
                logger.info("watching %s again in %.1f s: %s", self._upstream.name, _PAUSE_S, error)
            await asyncio.sleep(_PAUSE_S)

    def _heard(self, announcement: WatchResponse) -> None:
        """An announcement names the newest version: what is above it, or is another under its number, is over."""
        for version, (transfer, task) in self._transfers.items():
            arrival = self._arrivals.get(version)
            replaced = arrival is not None and arrival.manifest.digest != announcement.digest
            over = version > announcement.weight_version or (version == announcement.weight_version and replaced)
            if over and task.cancelling() == 0:
                logger.info("version=%d is not taken any more", transfer.weight_version)
                task.cancel()
        self._newest = announcement
        self._due.set()

    async def _follow(self) -> None:
        """Brings the newest version, then what is newest then."""
        while True:
            await self._due.wait()
            self._due.clear()
            if (announcement := self._newest) is None:
                continue
            try:
                await self._bring_newest(announcement)
            except (UnavailableError, WeightTransferError) as error:
                logger.warning("version=%d is not here yet: %s", announcement.weight_version, error)
                await asyncio.sleep(_PAUSE_S)
                self._due.set()
            except RefusedError as error:
                logger.error("version=%d cannot be had: %s", announcement.weight_version, error)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_REFUSED_PAUSE_S):
                        await self._due.wait()
                self._due.set()

    async def _bring_newest(self, announcement: WatchResponse) -> None:
        await self._end_cancelled()
        await self._forget_what_upstream_forgot(announcement)
        held = self._store.versions.get(announcement.weight_version)
        if (
            held is not None
            and held.manifest.digest == announcement.digest
            and min(held.manifest.attempt, self._files_attempt) >= announcement.attempt
        ):
            return
        transfer, task = self._begin(announcement.weight_version)
        begun = asyncio.create_task(transfer.begun.wait())
        try:
            await asyncio.wait({begun, task}, return_when=asyncio.FIRST_COMPLETED)
            if transfer.begun.is_set():
                self._announce(announcement)
            await asyncio.wait({task})
        finally:
            begun.cancel()
        if not task.cancelled():
            task.result()

    async def _end_cancelled(self) -> None:
        """What is on its last step is there afterwards, and can be forgotten."""
        cancelled = [task for _transfer, task in self._transfers.values() if task.cancelling() > 0]
        if cancelled:
            await asyncio.wait(cancelled)

    def _announce(self, announcement: WatchResponse) -> None:
        manifest = self._arrivals.manifests().get(announcement.weight_version)
        stored = self._store.versions.get(announcement.weight_version)
        if manifest is None and stored is not None:
            manifest = stored.manifest
        if manifest is not None:
            self._announcements.announce(manifest)

    async def _forget_what_upstream_forgot(self, announcement: WatchResponse) -> None:
        """Before anything of a new attempt is taken, all that the upstream does not have just so is forgotten."""
        over = [stored for version, stored in self._store.versions.items() if version > announcement.weight_version]
        if announcement.attempt > self._ledger.attempt:
            upstream = await self._upstream.versions()
            over = [
                stored
                for version, stored in self._store.versions.items()
                if version not in upstream or upstream[version].digest != stored.manifest.digest
            ]
        await self._forget(over)
        if announcement.attempt > self._ledger.attempt:
            self._ledger.raise_attempt(announcement.attempt)

    async def _forget(self, over: Iterable[StoredVersion]) -> None:
        for stored in over:
            logger.info("version=%d (attempt %d) is forgotten", stored.weight_version, stored.manifest.attempt)
            await asyncio.to_thread(self._store.forget, stored)
            self._receivers.forget_version(stored.weight_version)

    def _begin(self, weight_version: int) -> "tuple[Transfer, asyncio.Task[StoredVersion]]":
        """The transfer of a version: the one that runs, or a new one."""
        running = self._transfers.get(weight_version)
        if running is not None:
            return running
        attempt = self._newest.attempt if self._newest is not None else self._ledger.attempt
        transfer = Transfer(
            weight_version,
            self._upstream,
            self._store,
            self._arrivals,
            self._pacer,
            attempt=attempt,
            with_files=self._files_attempt < attempt,
            suspect=self._retention.suspect,
            bring_base=self._bring_base,
        )
        task = asyncio.create_task(self._carry(transfer, attempt))
        self._transfers[weight_version] = transfer, task
        task.add_done_callback(lambda _task: self._ended(transfer))
        return transfer, task

    async def _bring_base(self, adapter: Adapter) -> None:
        """Returns when what adapters are added to is here, whole, and marked so that it stays.

        Raises:
            RefusedError: the upstream does not hold it.
            WeightTransferError: it came damaged again and again, or the upstream has other weights under its number.
        """
        version = adapter.base_weight_version
        held = self._store.versions.get(version)
        if held is not None and held.manifest.digest == adapter.base_digest and held.manifest.is_base:
            return
        _transfer, task = self._begin(version)
        # Receivers may wait for it as well.
        brought = await asyncio.shield(task)
        if brought.manifest.digest != adapter.base_digest:
            raise WeightTransferError(
                f"{self._upstream.name} has version {version} with digest {brought.manifest.digest}, and adapters are "
                f"for {adapter.base_digest}"
            )

    def _ended(self, transfer: Transfer) -> None:
        if (running := self._transfers.get(transfer.weight_version)) is not None and running[0] is transfer:
            del self._transfers[transfer.weight_version]

    async def _carry(self, transfer: Transfer, attempt: int) -> StoredVersion:
        started = time.monotonic()
        stored = await transfer.run()
        self._files_attempt = max(self._files_attempt, attempt)
        self._retention.committed(stored)
        fetch_s = time.monotonic() - started
        logger.info(
            "version=%d (attempt %d) has come from %s: %d bytes for %d in %.2f s",
            stored.weight_version,
            stored.manifest.attempt,
            self._upstream.name,
            transfer.bytes_received,
            stored.manifest.num_bytes,
            fetch_s,
        )
        self.acknowledged(
            AcknowledgeRequest(
                attempt=attempt, weight_version=stored.weight_version, digest=stored.manifest.digest, fetch_s=fetch_s
            )
        )
        return stored

    async def _pass_on(self) -> None:
        """Sends the newest acknowledgement of each receiver, and this relay's own."""
        while True:
            await self._acknowledged.wait()
            self._acknowledged.clear()
            waiting, self._acknowledgements = self._acknowledgements, {}
            while waiting:
                receiver, request = waiting.popitem()
                try:
                    await self._upstream.acknowledge(request)
                except UnavailableError as error:
                    logger.info("acknowledgements wait: %s", error)
                    self._acknowledgements = waiting | {receiver: request} | self._acknowledgements
                    self._acknowledged.set()
                    await asyncio.sleep(_PAUSE_S)
                    break
                except StreamRLError as error:
                    logger.warning("an acknowledgement of %s is not taken: %s", receiver or "this relay", error)
