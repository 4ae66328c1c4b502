"""Brings one version from the upstream to a relay, and lets it be handed out while it arrives.

A broken stream goes on behind the last chunk that came; a tensor that came damaged comes again, whole and by itself.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial

from streamrl.digest import version_digest
from streamrl.errors import UnavailableError, WeightTransferError
from streamrl.rpc.chunks import FetchedChunk, decode_fetch_response
from streamrl.v1.weights_pb2 import (
    TRANSFER_FORMAT_DELTA,
    TRANSFER_FORMAT_FULL,
    Adapter,
    FetchRequest,
    ModelFile,
    NegotiateRequest,
    NegotiateResponse,
    PublishFooter,
    PublishHeader,
    VersionManifest,
)
from weights_svc.arrivals import Arrival, Arrivals
from weights_svc.assembly import Assembly
from weights_svc.incoming import IncomingVersion
from weights_svc.lanes import STRIPE_BYTES, fetch_in_lanes, requests_for, stripe_starts
from weights_svc.outgoing import Position
from weights_svc.pacing import Pacer
from weights_svc.store import StoredVersion, VersionStore
from weights_svc.upstream import Upstream

logger = logging.getLogger(__name__)

_BATCH_BYTES = 1024 * 1024
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
_MAX_DAMAGES = 5
"""So often one tensor may come damaged in a row before the version is given up."""


class Transfer:
    """Run it once. Belongs to one event loop."""

    def __init__(
        self,
        weight_version: int,
        upstream: Upstream,
        store: VersionStore,
        arrivals: Arrivals,
        pacer: Pacer,
        *,
        attempt: int,
        with_files: bool,
        suspect: Callable[[StoredVersion], None],
        bring_base: Callable[[Adapter], Awaitable[None]],
    ) -> None:
        """
        Args:
            with_files: take the model's files as well.
            suspect: called with a base that may be damaged.
            bring_base: brings what the version's tensors are added to, where they are adapters; raises as `run`.
        """
        self.weight_version = weight_version
        self._upstream = upstream
        self._store = store
        self._arrivals = arrivals
        self._pacer = pacer
        self._attempt = attempt
        self._with_files = with_files
        self._suspect = suspect
        self._bring_base = bring_base
        self._damages = 0
        self._pause_s = _FIRST_PAUSE_S
        self.bytes_received = 0
        """Of data, as it came: differences count as what they took."""
        self.begun = asyncio.Event()
        """Set when the version can be negotiated here."""

    async def run(self) -> StoredVersion:
        """The version, committed. Tries as long as the upstream does not answer.

        Raises:
            RefusedError: the upstream does not hold the version, or (NoRoomError) the disk is full.
            WeightTransferError: it came damaged again and again.
        """
        plan = await self._first_plan()
        manifest = plan.manifest
        if self._with_files:
            await asyncio.to_thread(self._store.keep_model_files, list[ModelFile](plan.files))
        held = self._store.versions.get(self.weight_version)
        if held is not None and held.manifest.digest == manifest.digest:
            stored = await asyncio.to_thread(self._store.adopt, held, manifest)
            self.begun.set()
            return stored
        if held is not None:
            await asyncio.to_thread(self._store.forget, held)
        if manifest.HasField("adapter"):
            # First, so that whoever is handed out the one can have the other here.
            await self._bring_base(manifest.adapter)
        return await self._bring(plan)

    async def _bring(self, plan: NegotiateResponse) -> StoredVersion:
        manifest, loop = plan.manifest, asyncio.get_running_loop()
        header = PublishHeader(
            weight_version=manifest.weight_version,
            attempt=manifest.attempt,
            tensors=manifest.tensors,
            canaries=manifest.canaries,
            adapter=manifest.adapter if manifest.HasField("adapter") else None,
            is_base=manifest.is_base,
        )
        digests = [tensor.digest for tensor in manifest.tensors]
        incoming = self._store.receive(header, digests)
        # One thread, so that what it is given runs in order, also after this has been cancelled.
        thread = ThreadPoolExecutor(1, thread_name_prefix=f"arrive-{manifest.weight_version}")
        arrival: Arrival | None = None
        try:
            await loop.run_in_executor(thread, incoming.open)
            arrival = Arrival(self._store.arriving(incoming, manifest))
            arrival.came(incoming.next_tensor_index)
            self._arrivals.began(arrival)
            self.begun.set()
            await self._receive(plan, incoming, arrival, thread)
            whole = await loop.run_in_executor(thread, incoming.finish, PublishFooter(digests=digests))
            committing = loop.run_in_executor(thread, partial(self._store.commit, incoming, whole, from_upstream=True))
            try:
                return await asyncio.shield(committing) or self._store.versions[manifest.weight_version]
            except asyncio.CancelledError:
                # It cannot be stopped: whoever cancels this finds the version in the store, or never.
                await asyncio.wait({committing})
                raise
        except BaseException as error:
            if arrival is not None:
                arrival.fail(str(error) or "it is no longer wanted")
            raise
        finally:
            if arrival is not None:
                self._arrivals.ended(arrival)
            thread.submit(incoming.close)
            thread.shutdown(wait=False)

    async def _receive(
        self, plan: NegotiateResponse, incoming: IncomingVersion, arrival: Arrival, thread: ThreadPoolExecutor
    ) -> None:
        """Takes streams until everything has come."""
        base, num_connections = self._base_of(plan), self._num_connections(plan)
        while True:
            try:
                await self._stream(base, incoming, arrival, thread, num_connections)
                if incoming.complete:
                    return
                raise UnavailableError(f"{self._upstream.name} ended the stream at tensor {incoming.next_tensor_index}")
            except UnavailableError as error:
                await self._pause(error)
                base = self._base_of(await self._next_plan(plan.manifest, whole=False))
            except WeightTransferError as error:
                self._damages += 1
                if self._damages > _MAX_DAMAGES:
                    raise
                logger.warning("version=%d: %s; taking it again, as it is", self.weight_version, error)
                if base is not None:
                    self._suspect(base)
                await self._pause(error)
                base = self._base_of(await self._next_plan(plan.manifest, whole=True))

    async def _stream(
        self,
        base: StoredVersion | None,
        incoming: IncomingVersion,
        arrival: Arrival,
        thread: ThreadPoolExecutor,
        num_connections: int,
    ) -> None:
        """Everything from where the incoming version stands: one batch is put together while the next is received."""
        request = FetchRequest(
            weight_version=self.weight_version,
            digest=arrival.manifest.digest,
            format=TRANSFER_FORMAT_FULL if base is None else TRANSFER_FORMAT_DELTA,
            verify_first=self._damages > 0,
        )
        if base is not None:
            request.base_weight_version, request.base_digest = base.weight_version, base.manifest.digest
        tensor_bytes = [tensor.num_bytes for tensor in arrival.manifest.tensors]
        first = Position(incoming.next_tensor_index, incoming.next_offset)
        starts = stripe_starts(tensor_bytes, first, STRIPE_BYTES) if num_connections > 1 else [first]
        requests = requests_for(request, starts, len(tensor_bytes))
        writer = _Writer(Assembly(incoming, arrival.stored, base), incoming, arrival, thread)
        try:
            async with aclosing(
                fetch_in_lanes(self._upstream.fetch, requests, num_connections, self._pace)
            ) as messages:
                async for message in messages:
                    chunk = decode_fetch_response(message)
                    self.bytes_received += len(chunk.data)
                    self._pause_s = _FIRST_PAUSE_S
                    if await writer.add(chunk):
                        self._damages = 0
            await writer.finish()
        except ValueError as error:
            raise WeightTransferError(f"{self._upstream.name} sent what does not come next: {error}") from error
        finally:
            await writer.close()

    async def _pace(self, message: bytes) -> None:
        if (pause_s := self._pacer.pause_s(len(message), time.monotonic())) > 0:
            await asyncio.sleep(pause_s)

    def _num_connections(self, plan: NegotiateResponse) -> int:
        """One only, where the upstream cannot send a part of a version."""
        return self._upstream.num_connections if plan.serves_ranges else 1

    async def _first_plan(self) -> NegotiateResponse:
        while True:
            try:
                plan = await self._negotiate(whole=False, with_files=self._with_files)
            except UnavailableError as error:
                await self._pause(error)
                continue
            manifest = plan.manifest
            if version_digest(manifest.tensors, manifest.adapter) != manifest.digest:
                raise WeightTransferError(
                    f"the manifest of version {self.weight_version} does not agree with its own digest"
                )
            return plan

    async def _next_plan(self, manifest: VersionManifest, *, whole: bool) -> NegotiateResponse:
        """
        Raises:
            UnavailableError: the upstream has other weights under the number meanwhile.
        """
        while True:
            try:
                plan = await self._negotiate(whole=whole)
            except UnavailableError as error:
                await self._pause(error)
                continue
            if plan.manifest.digest != manifest.digest:
                raise WeightTransferError(f"{self._upstream.name} has other weights as version {self.weight_version}")
            return plan

    async def _negotiate(self, *, whole: bool, with_files: bool = False) -> NegotiateResponse:
        request = NegotiateRequest(
            attempt=self._attempt,
            formats=[TRANSFER_FORMAT_FULL] if whole else [TRANSFER_FORMAT_DELTA, TRANSFER_FORMAT_FULL],
            exact_weight_version=self.weight_version,
            with_files=with_files,
        )
        held = nearest_version(self._store, self.weight_version)
        if held is not None:
            request.held_weight_version, request.held_digest = held.weight_version, held.manifest.digest
        return await self._upstream.negotiate(request)

    def _base_of(self, plan: NegotiateResponse) -> StoredVersion | None:
        if plan.format != TRANSFER_FORMAT_DELTA:
            return None
        return self._store.versions.get(plan.base_weight_version)

    async def _pause(self, error: Exception) -> None:
        logger.info("version=%d: trying again in %.1f s: %s", self.weight_version, self._pause_s, error)
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)


class _Writer:
    """Puts chunks together in a thread, as soon as the thread is idle: on a slow line each by itself, on a fast one
    many at a time. Belongs to one event loop."""

    def __init__(
        self, assembly: Assembly, incoming: IncomingVersion, arrival: Arrival, thread: ThreadPoolExecutor
    ) -> None:
        self._assembly = assembly
        self._incoming = incoming
        self._arrival = arrival
        self._thread = thread
        self._first_tensor_index = incoming.next_tensor_index
        self._batch: list[FetchedChunk] = []
        self._batch_bytes = 0
        self._writing: asyncio.Task[None] | None = None

    async def add(self, chunk: FetchedChunk) -> bool:
        """Takes a chunk; waits while too much is waiting already.

        Returns:
            Whether a tensor has come whole since the stream began.

        Raises:
            ValueError, WeightTransferError: an earlier one was wrong.
        """
        self._batch.append(chunk)
        self._batch_bytes += chunk.stretch.num_bytes
        if self._batch_bytes >= _BATCH_BYTES or (self._writing is not None and self._writing.done()):
            await self._written()
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())
        return self._arrival.has(self._first_tensor_index)

    async def finish(self) -> None:
        """Everything has come.

        Raises:
            ValueError, WeightTransferError: something of it was wrong.
        """
        await self._written()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._assembly.finish)
        self._arrival.came(self._incoming.next_tensor_index)

    async def close(self) -> None:
        """What is being written is written, the rest is dropped."""
        self._batch = []
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)
        self._thread.submit(self._assembly.close)

    async def _written(self) -> None:
        """Waits until nothing is waiting or being written."""
        if self._writing is not None:
            await self._writing
            self._writing = None
        await self._write()

    async def _write(self) -> None:
        while self._batch:
            batch, self._batch, self._batch_bytes = self._batch, [], 0
            await asyncio.get_running_loop().run_in_executor(self._thread, self._assembly.write, batch)
            self._arrival.came(self._incoming.next_tensor_index)


def nearest_version(store: VersionStore, weight_version: int) -> StoredVersion | None:
    """What a version most probably differs least from: itself, the newest before it, or else the oldest after it."""
    held = store.versions
    before = [version for version in held if version <= weight_version]
    nearest = max(before) if before else min(held, default=None)
    return None if nearest is None else held[nearest]
