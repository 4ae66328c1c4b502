"""WeightsService as gRPC sees it: checks the caller, calls the parts, and moves bytes between them and the streams.

Disk work and digests run in threads, beside the event loop: while one batch of chunks is written and digested the next
is received, and while one is sent the next is read (outgoing.py). A relay answers as an origin does; what it does not
hold it brings first.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import grpc

from streamrl.errors import RefusedError, UnavailableError, WeightTransferError
from streamrl.rpc.chunks import Stretch, decode_publish_request
from streamrl.v1.weights_pb2 import (
    TRANSFER_FORMAT_DELTA,
    TRANSFER_FORMAT_FULL,
    TRANSFER_FORMAT_NCCL,
    AcknowledgeRequest,
    AcknowledgeResponse,
    FabricGroup,
    FetchRequest,
    ListVersionsRequest,
    ListVersionsResponse,
    ModelFile,
    NegotiateRequest,
    NegotiateResponse,
    PublishFooter,
    PublishHeader,
    PublishResponse,
    RewindRequest,
    RewindResponse,
    VersionManifest,
    WatchRequest,
    WatchResponse,
)
from streamrl.v1.weights_pb2_grpc import WeightsServiceServicer, add_WeightsServiceServicer_to_server
from weights_svc.announcements import Announcements
from weights_svc.arrivals import Arrival, Arrivals
from weights_svc.fabric_sender import FabricSender
from weights_svc.incoming import IncomingVersion
from weights_svc.ledger import Ledger
from weights_svc.negotiate import TransferPlan, negotiate
from weights_svc.outgoing import Outgoing, Position, lies_inside
from weights_svc.receivers import Receivers
from weights_svc.relay_loop import RelayLoop
from weights_svc.retention_loop import RetentionLoop
from weights_svc.store import StoredVersion, VersionStore

logger = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

SERVICE_NAME = "streamrl.v1.WeightsService"
SERVES_RANGES = True
"""A service of an earlier version does not: it sends up to the end of a version whatever the request says."""
_BATCH_BYTES = 1024 * 1024
"""Chunks go to a thread together until they are this large: a model may have thousands of tiny tensors."""
_NEXT_ARRIVAL_S = 5.0
"""For so long a relay that is asked for a version that its upstream has just announced waits to hear of it."""


class WeightsServicer(WeightsServiceServicer):
    """Belongs to one event loop."""

    def __init__(
        self,
        run_id: str,
        store: VersionStore,
        ledger: Ledger,
        receivers: Receivers,
        announcements: Announcements,
        arrivals: Arrivals,
        retention: RetentionLoop,
        relay: RelayLoop | None,
        fabric: FabricSender | None,
        *,
        chunk_bytes: int,
        anchor_every: int,
    ) -> None:
        """
        Args:
            relay: None where versions are published.
            fabric: None where there is none.
        """
        self._run_id = run_id
        self._store = store
        self._ledger = ledger
        self._receivers = receivers
        self._announcements = announcements
        self._arrivals = arrivals
        self._retention = retention
        self._relay = relay
        self._fabric = fabric
        self._chunk_bytes = chunk_bytes
        self._anchor_every = anchor_every

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to a server, with chunks that this class encodes and decodes itself."""
        add_WeightsServiceServicer_to_server(self, server)
        bulk = {
            "Publish": grpc.stream_unary_rpc_method_handler(
                self.Publish, response_serializer=PublishResponse.SerializeToString
            ),
            "Fetch": grpc.unary_stream_rpc_method_handler(self.Fetch, request_deserializer=FetchRequest.FromString),
        }
        server.add_registered_method_handlers(SERVICE_NAME, bulk)  # type: ignore[attr-defined]

    async def Publish(  # type: ignore[override]
        self, requests: AsyncIterator[bytes], context: Context
    ) -> PublishResponse:
        """Takes its requests serialised: see `register`."""
        started = time.monotonic()
        header = _header(await anext(aiter(requests), b""))
        self._check_run(header.run_id)
        self._check_origin()
        self._ledger.raise_attempt(header.attempt)
        incoming = self._store.receive(header)
        loop = asyncio.get_running_loop()
        # One thread, so that what it is given runs in order, also after this call has been cancelled.
        thread = ThreadPoolExecutor(1, thread_name_prefix=f"publish-{header.weight_version}")
        try:
            await loop.run_in_executor(thread, incoming.open)
            footer = await _receive(requests, incoming, thread)
            manifest = await loop.run_in_executor(thread, incoming.finish, footer)
            await self._retention.recovered.wait()
            committed = loop.run_in_executor(thread, self._store.commit, incoming, manifest)
            committed.add_done_callback(self._announce)
            await asyncio.shield(committed)
        finally:
            thread.submit(incoming.close)
            thread.shutdown(wait=False)
        logger.info(
            "version=%d (attempt %d) is announced: %d tensors, %d bytes in %.2f s",
            header.weight_version,
            header.attempt,
            len(manifest.tensors),
            manifest.num_bytes,
            time.monotonic() - started,
        )
        return PublishResponse(digest=manifest.digest)

    def _announce(self, committed: "asyncio.Future[StoredVersion | None]") -> None:
        """Runs when a commit is done, also when its publisher has gone meanwhile."""
        if committed.cancelled() or committed.exception() is not None:
            return
        stored = committed.result()
        if stored is not None:
            self._retention.committed(stored)
            if self._store.newest is stored:
                self._announcements.announce(stored.manifest)

    async def Negotiate(self, request: NegotiateRequest, context: Context) -> NegotiateResponse:
        self._check_run(request.run_id)
        self._ledger.check(request.attempt)
        self._receivers.negotiates(request, time.monotonic())
        if self._fabric is not None and request.failed_group:
            self._fabric.left(request.failed_group)
        plan = await self._plan(request)
        group: FabricGroup | None = None
        if plan.format == TRANSFER_FORMAT_NCCL:
            group = await self._place(request, plan.weight_version)
            if group is None:
                plan = self._plan_now(request, over_fabric=False)
        files: list[ModelFile] = []
        if request.with_files:
            files = await asyncio.to_thread(self._store.model_files)
        manifest = self._manifests().get(plan.weight_version)
        if manifest is None:
            raise UnavailableError(f"weight version {plan.weight_version} has gone just now: negotiate again")
        if plan.transfer_bytes > 0 and not plan.source_address:
            self._receivers.negotiated(request.receiver, plan.weight_version, time.monotonic())
        logger.debug(
            "%s takes version=%d, %d bytes, from %s",
            request.receiver,
            plan.weight_version,
            plan.transfer_bytes,
            plan.source_address or "here",
        )
        return NegotiateResponse(
            manifest=manifest,
            format=plan.format,
            transfer_bytes=plan.transfer_bytes,
            source_address=plan.source_address,
            files=files,
            base_weight_version=plan.base_weight_version,
            serves_ranges=SERVES_RANGES,
            fabric_group=group,
        )

    async def _place(self, request: NegotiateRequest, weight_version: int) -> FabricGroup | None:
        """The receiver's place among those that are sent the version at once; None: it fetches it."""
        assert self._fabric is not None
        return await self._fabric.place(request.receiver, request.fabric_group, self._store.versions[weight_version])

    async def _plan(self, request: NegotiateRequest) -> TransferPlan:
        """A relay looks again when what is asked for may be on its way to it."""
        try:
            return self._plan_now(request)
        except LookupError as error:
            if not self._retention.recovered.is_set():
                raise UnavailableError(f"{error.args[0]}; others are being verified after a restart") from error
            if self._relay is None:
                raise
            await self._relay.bring(request.exact_weight_version)
        except UnavailableError:
            if self._relay is None:
                raise
            await self._arrivals.wait_for_next(_NEXT_ARRIVAL_S)
        return self._plan_now(request)

    def _plan_now(self, request: NegotiateRequest, *, over_fabric: bool = True) -> TransferPlan:
        fabric = self._fabric if over_fabric else None
        return negotiate(
            self._manifests(),
            request,
            anchor_every=self._anchor_every,
            relays=self._receivers.relays(),
            fabric=None if fabric is None else fabric.offer(self._store.versions),
        )

    async def Fetch(self, request: FetchRequest, context: Context) -> AsyncIterator[bytes]:  # type: ignore[override]
        """Yields its responses serialised: see `register`."""
        self._check_run(request.run_id)
        stored, arrival = await self._fetched_version(request)
        base = self._base(request)
        first, end = _range(request)
        for position in (first, end):
            if position is not None and not lies_inside(stored.manifest, position):
                raise ValueError(
                    f"a fetch from or to tensor {position.tensor_index}, byte {position.offset}: expected a position "
                    f"inside {len(stored.manifest.tensors)} tensors"
                )
        version, receiver = stored.weight_version, request.receiver
        comes_again = self._receivers.fetch_began(receiver, version)
        to_the_end = False
        outgoing = Outgoing(stored, base=base, arrival=arrival, end=end, chunk_bytes=self._chunk_bytes)
        try:
            if (comes_again or request.verify_first) and arrival is None:
                logger.info("%s was sent version=%d before: verifying it", receiver, version)
                await asyncio.to_thread(self._store.verify, stored)
            async for response in outgoing.responses(first):
                yield response.message
                self._ledger.count_traffic(bytes_full=response.bytes_full, bytes_sent=response.bytes_sent)
            # A stream that breaks says nothing of what it left out: one up to the end speaks for all before it.
            left_out = outgoing.bytes_left_out(first if end is not None else Position(0, 0))
            if end is None:
                left_out += self._base_bytes(stored)
            self._ledger.count_traffic(bytes_full=left_out, bytes_sent=0)
            to_the_end = end is None
        except WeightTransferError as error:
            await self._retention.drop(stored, error)
            if base is not None:
                self._retention.suspect(base)
            if self._relay is not None:
                self._relay.lost()
            raise
        finally:
            self._receivers.fetch_ended(receiver, version, to_the_end=to_the_end, now_s=time.monotonic())
            self._ledger.save_traffic()
            self._retention.look()

    def _base_bytes(self, stored: StoredVersion) -> int:
        """Of what the version's adapters are added to, which the receiver has already; 0 where it has none."""
        adapter = stored.manifest.adapter
        base = self._store.versions.get(adapter.base_weight_version) if adapter.base_digest else None
        return 0 if base is None else base.manifest.num_bytes

    async def _fetched_version(self, request: FetchRequest) -> tuple[StoredVersion, Arrival | None]:
        """What is asked for, and how it stands with it if it is still arriving."""
        version = request.weight_version
        if self._relay is not None and version not in self._manifests():
            await self._relay.bring(version)
        arrival = self._arrivals.get(version)
        stored = self._store.versions.get(version) if arrival is None else arrival.stored
        if stored is None:
            raise LookupError(f"weight version {version} is not here (any more): negotiate again")
        if request.digest != stored.manifest.digest:
            raise RefusedError(
                f"version {version} has digest {stored.manifest.digest} here, and {request.digest} was asked for: "
                f"negotiate again"
            )
        return stored, arrival

    def _base(self, request: FetchRequest) -> StoredVersion | None:
        """What the differences are to; None for whole tensors."""
        if request.format == TRANSFER_FORMAT_FULL:
            return None
        if request.format != TRANSFER_FORMAT_DELTA:
            raise ValueError("there is no such form: expected TRANSFER_FORMAT_FULL or TRANSFER_FORMAT_DELTA")
        base = self._store.versions.get(request.base_weight_version)
        if base is None or base.manifest.digest != request.base_digest:
            # No answer is final here: a new negotiation gives another plan.
            raise UnavailableError(
                f"version {request.base_weight_version} with digest {request.base_digest or 'none'} is not here (any "
                f"more): negotiate again"
            )
        return base

    async def Watch(self, request: WatchRequest, context: Context) -> AsyncIterator[WatchResponse]:
        self._check_run(request.run_id)
        self._receivers.watch_began(request.watcher)
        try:
            async for announcement in self._announcements.watch(self._newest()):
                yield announcement
        finally:
            self._receivers.watch_ended(request.watcher, time.monotonic())
            self._retention.look()

    async def Acknowledge(self, request: AcknowledgeRequest, context: Context) -> AcknowledgeResponse:
        self._check_run(request.run_id)
        self._ledger.check(request.attempt)
        manifest = self._manifests().get(request.weight_version)
        if manifest is not None and request.digest != manifest.digest:
            raise RefusedError(
                f"{request.receiver} loaded version {request.weight_version} with digest {request.digest}: it is "
                f"{manifest.digest}"
            )
        self._receivers.acknowledged(request, time.monotonic())
        if self._relay is not None:
            self._relay.acknowledged(request)
        self._retention.look()
        logger.info(
            "%s has version=%d: fetched in %.2f s, switched in %.3f s",
            request.receiver,
            request.weight_version,
            request.fetch_s,
            request.switch_s,
        )
        return AcknowledgeResponse()

    async def Rewind(self, request: RewindRequest, context: Context) -> RewindResponse:
        self._check_run(request.run_id)
        self._check_origin()
        self._ledger.raise_attempt(request.attempt)
        await self._retention.recovered.wait()
        forgotten = await asyncio.to_thread(self._store.rewind, request.weight_version)
        for version in forgotten:
            self._receivers.forget_version(version)
        newest = self._store.newest
        if forgotten and newest is not None:
            self._announcements.announce(newest.manifest)
        logger.info("back to version=%d (attempt %d): forgotten %s", request.weight_version, request.attempt, forgotten)
        return RewindResponse(forgotten_weight_versions=forgotten)

    async def ListVersions(self, request: ListVersionsRequest, context: Context) -> ListVersionsResponse:
        self._check_run(request.run_id)
        versions = self._store.versions
        return ListVersionsResponse(
            versions=[versions[version].manifest for version in sorted(versions)],
            receivers=self._receivers.to_proto(),
            bytes_full=self._ledger.bytes_full,
            bytes_sent=self._ledger.bytes_sent,
        )

    def _manifests(self) -> dict[int, VersionManifest]:
        """What can be handed out, by weight version: also what is still arriving."""
        held = {version: stored.manifest for version, stored in self._store.versions.items()}
        return held | self._arrivals.manifests()

    def _newest(self) -> VersionManifest | None:
        manifests = self._manifests()
        return manifests[max(manifests)] if manifests else None

    def _check_origin(self) -> None:
        if self._relay is not None:
            raise RefusedError("this weights_svc is a relay: versions are published and forgotten at the origin")

    def _check_run(self, run_id: str) -> None:
        if run_id != self._run_id:
            raise RefusedError(f"these are the weights of run {self._run_id}, not of {run_id!r}")


def _range(request: FetchRequest) -> tuple[Position, Position | None]:
    """From where to where; None: to the end."""
    first = Position(request.first_tensor_index, request.first_offset)
    if not request.HasField("end_tensor_index"):
        return first, None
    return first, Position(request.end_tensor_index, request.end_offset)


def _header(message: bytes) -> PublishHeader:
    first = decode_publish_request(message)
    if isinstance(first, tuple) or not first.HasField("header"):
        raise ValueError("the stream does not begin with a header")
    return first.header


async def _receive(
    requests: AsyncIterator[bytes], incoming: IncomingVersion, thread: ThreadPoolExecutor
) -> PublishFooter:
    """Takes chunks up to the footer, which ends the stream."""
    loop = asyncio.get_running_loop()
    batch: list[tuple[Stretch, memoryview]] = []
    batch_bytes = 0
    writing: asyncio.Future[None] | None = None
    footer: PublishFooter | None = None
    async for message in requests:
        if footer is not None:
            raise ValueError("the stream goes on after its footer")
        part = decode_publish_request(message)
        if isinstance(part, tuple):
            batch.append(part)
            batch_bytes += len(message)
        elif part.HasField("footer"):
            footer = part.footer
        else:
            raise ValueError("the stream has a second header, or an empty part")
        if batch_bytes >= _BATCH_BYTES:
            if writing is not None:
                await writing
            writing = loop.run_in_executor(thread, incoming.write, batch)
            batch, batch_bytes = [], 0
    if writing is not None:
        await writing
    if footer is None:
        raise ValueError(f"version {incoming.header.weight_version} ended without a footer: it is not announced")
    await loop.run_in_executor(thread, incoming.write, batch)
    return footer
