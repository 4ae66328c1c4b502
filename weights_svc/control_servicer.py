"""WeightsService as gRPC sees it: checks the caller, calls the parts, and moves bytes between them and the streams.

Disk work and digests run in threads, beside the event loop: while one batch of chunks is written and digested the next
is received, and while one is sent the next is read.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import grpc

from streamrl.errors import RefusedError, UnavailableError, WeightTransferError
from streamrl.rpc.chunks import Stretch, cut, decode_publish_request, encode_fetch_response
from streamrl.v1.weights_pb2 import (
    TRANSFER_FORMAT_FULL,
    AcknowledgeRequest,
    AcknowledgeResponse,
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
    TensorInfo,
    WatchRequest,
    WatchResponse,
)
from streamrl.v1.weights_pb2_grpc import WeightsServiceServicer, add_WeightsServiceServicer_to_server
from weights_svc.announcements import Announcements
from weights_svc.incoming import IncomingVersion
from weights_svc.ledger import Ledger
from weights_svc.negotiate import HeldVersion, negotiate
from weights_svc.receivers import Receivers
from weights_svc.retention_loop import RetentionLoop
from weights_svc.store import StoredVersion, VersionReader, VersionStore, batches

logger = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

SERVICE_NAME = "streamrl.v1.WeightsService"
_BATCH_BYTES = 1024 * 1024
"""Chunks go to a thread together until they are this large: a model may have thousands of tiny tensors."""


class WeightsServicer(WeightsServiceServicer):
    """Belongs to one event loop."""

    def __init__(
        self,
        run_id: str,
        store: VersionStore,
        ledger: Ledger,
        receivers: Receivers,
        announcements: Announcements,
        retention: RetentionLoop,
        *,
        chunk_bytes: int,
    ) -> None:
        self._run_id = run_id
        self._store = store
        self._ledger = ledger
        self._receivers = receivers
        self._announcements = announcements
        self._retention = retention
        self._chunk_bytes = chunk_bytes

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
        files: list[ModelFile] = []
        if request.with_files:
            files = await asyncio.to_thread(self._store.model_files)
        versions = self._store.versions
        try:
            plan = negotiate(
                {
                    version: HeldVersion(stored.manifest.digest, stored.manifest.num_bytes)
                    for version, stored in versions.items()
                },
                formats=request.formats,
                min_weight_version=request.min_weight_version,
                exact_weight_version=request.exact_weight_version if request.HasField("exact_weight_version") else None,
                held_weight_version=request.held_weight_version if request.HasField("held_weight_version") else None,
                held_digest=request.held_digest,
            )
        except LookupError as error:
            if not self._retention.recovered.is_set():
                raise UnavailableError(f"{error.args[0]}; others are being verified after a restart") from error
            raise
        if plan.transfer_bytes > 0:
            self._receivers.negotiated(request.receiver, plan.weight_version, time.monotonic())
        logger.debug("%s takes version=%d, %d bytes", request.receiver, plan.weight_version, plan.transfer_bytes)
        return NegotiateResponse(
            manifest=versions[plan.weight_version].manifest,
            format=plan.format,
            transfer_bytes=plan.transfer_bytes,
            files=files,
        )

    async def Fetch(self, request: FetchRequest, context: Context) -> AsyncIterator[bytes]:  # type: ignore[override]
        """Yields its responses serialised: see `register`."""
        self._check_run(request.run_id)
        stored = self._fetched_version(request)
        _check_position(request, stored.manifest.tensors)
        version, receiver = stored.weight_version, request.receiver
        comes_again = self._receivers.fetch_began(receiver, version)
        to_the_end = False
        try:
            if comes_again:
                logger.info("%s was sent version=%d before: verifying it", receiver, version)
                await asyncio.to_thread(self._store.verify, stored)
            async for num_bytes, response in self._read(stored, request):
                yield response
                self._ledger.count_traffic(bytes_full=num_bytes, bytes_sent=num_bytes)
            to_the_end = True
        except WeightTransferError as error:
            await self._retention.drop(stored, error)
            raise
        finally:
            self._receivers.fetch_ended(receiver, version, to_the_end=to_the_end, now_s=time.monotonic())
            self._ledger.save_traffic()
            self._retention.look()

    async def _read(self, stored: StoredVersion, request: FetchRequest) -> AsyncIterator[tuple[int, bytes]]:
        """The lengths and responses of a fetch: the next batch is read while this one is sent."""
        loop = asyncio.get_running_loop()
        tensor_bytes = [tensor.num_bytes for tensor in stored.manifest.tensors]
        stretches = cut(tensor_bytes, self._chunk_bytes, request.first_tensor_index, request.first_offset)
        coming = batches(stretches, _BATCH_BYTES)
        reader = VersionReader(stored)
        # One thread, so that the file is closed behind the last read, also when the receiver has gone.
        thread = ThreadPoolExecutor(1, thread_name_prefix=f"fetch-{stored.weight_version}")
        try:
            batch = next(coming, None)
            reading = None if batch is None else loop.run_in_executor(thread, _read_batch, reader, batch)
            while reading is not None:
                responses = await reading
                batch = next(coming, None)
                reading = None if batch is None else loop.run_in_executor(thread, _read_batch, reader, batch)
                for response in responses:
                    yield response
        finally:
            thread.submit(reader.close)
            thread.shutdown(wait=False)

    def _fetched_version(self, request: FetchRequest) -> StoredVersion:
        stored = self._store.versions.get(request.weight_version)
        if stored is None:
            raise LookupError(f"weight version {request.weight_version} is not here (any more): negotiate again")
        if request.digest != stored.manifest.digest:
            raise RefusedError(
                f"version {request.weight_version} has digest {stored.manifest.digest} here, and {request.digest} was "
                f"asked for: negotiate again"
            )
        if request.format != TRANSFER_FORMAT_FULL:
            raise ValueError("there is no such form: expected TRANSFER_FORMAT_FULL")
        return stored

    async def Watch(self, request: WatchRequest, context: Context) -> AsyncIterator[WatchResponse]:
        self._check_run(request.run_id)
        newest = self._store.newest
        async for announcement in self._announcements.watch(None if newest is None else newest.manifest):
            yield announcement

    async def Acknowledge(self, request: AcknowledgeRequest, context: Context) -> AcknowledgeResponse:
        self._check_run(request.run_id)
        self._ledger.check(request.attempt)
        stored = self._store.versions.get(request.weight_version)
        if stored is not None and request.digest != stored.manifest.digest:
            raise RefusedError(
                f"{request.receiver} loaded version {request.weight_version} with digest {request.digest}: it is "
                f"{stored.manifest.digest}"
            )
        self._receivers.acknowledged(request)
        self._retention.look()
        logger.info(
            "%s runs version=%d: fetched in %.2f s, switched in %.3f s",
            request.receiver,
            request.weight_version,
            request.fetch_s,
            request.switch_s,
        )
        return AcknowledgeResponse()

    async def Rewind(self, request: RewindRequest, context: Context) -> RewindResponse:
        self._check_run(request.run_id)
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

    def _check_run(self, run_id: str) -> None:
        if run_id != self._run_id:
            raise RefusedError(f"these are the weights of run {self._run_id}, not of {run_id!r}")


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


def _check_position(request: FetchRequest, tensors: Sequence[TensorInfo]) -> None:
    index, offset = request.first_tensor_index, request.first_offset
    num_bytes = tensors[index].num_bytes if 0 <= index < len(tensors) else 0
    if not (0 <= index <= len(tensors) and 0 <= offset <= num_bytes):
        raise ValueError(
            f"a fetch from tensor {index}, byte {offset}: expected a position inside {len(tensors)} tensors"
        )


def _read_batch(reader: VersionReader, batch: list[Stretch]) -> list[tuple[int, bytes]]:
    return [(stretch.num_bytes, encode_fetch_response(stretch, reader.read(stretch))) for stretch in batch]
