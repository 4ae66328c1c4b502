"""Fetches one weight version from weights_svc into host memory, every tensor checked against its digest. Where the
version has adapters alone, what they are added to comes after them, unless it is kept.

A broken stream goes on from the last chunk that arrived whole; a tensor that arrived damaged is fetched again; a source
that the service points to and that does not answer is left for another. This is the blocking half, for a thread of its
own; prefetcher.py keeps it beside generation.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from generator_svc.fabric_receiver import FabricReceiver
from generator_svc.version_assembly import VersionAssembly
from generator_svc.version_buffer import VersionBuffer
from streamrl.adapters import why_unfit
from streamrl.digest import version_digest
from streamrl.errors import (
    FabricError,
    RefusedError,
    StaleAttemptError,
    StreamRLError,
    UnavailableError,
    WeightTransferError,
)
from streamrl.rpc.channel import open_channel
from streamrl.rpc.chunks import FetchedChunk, decode_fetch_response
from streamrl.rpc.errors import peer_errors
from streamrl.v1.weights_pb2 import (
    TRANSFER_FORMAT_DELTA,
    TRANSFER_FORMAT_FULL,
    TRANSFER_FORMAT_NCCL,
    FetchRequest,
    NegotiateRequest,
    NegotiateResponse,
    VersionManifest,
)
from streamrl.v1.weights_pb2_grpc import WeightsServiceStub

logger = logging.getLogger(__name__)

_FETCH_METHOD = "/streamrl.v1.WeightsService/Fetch"
_NEGOTIATE_DEADLINE_S = 20.0
_STREAM_DEADLINE_S = 60.0
"""A stream that is still moving then goes on with the next call; one that hangs is found out."""
_RETRY_WAIT_S = 0.5
_MAX_DAMAGES = 3
"""So often data may arrive damaged before the version is given up."""


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Where versions come from, and who asks."""

    address: str
    """host:port of this site's weights_svc."""
    run_id: str
    attempt: int
    receiver: str
    """The instance's name."""
    site: str
    keep_base: bool = False
    """Keep the version that was fetched last, and fetch only what differs from it."""
    fabric: str = ""
    """The network between GPUs over which versions may come; empty: none."""
    patience_s: float = 60.0
    """A fetch that receives nothing for this long is given up."""


@dataclass(frozen=True, slots=True)
class FetchedVersion:
    """A version that lies whole and checked in host memory. Close it after loading it."""

    buffer: VersionBuffer
    fetch_s: float
    """From the negotiation to the last byte."""
    adapted: VersionBuffer | None = None
    """Where the version has adapters: what they are added to."""

    @property
    def manifest(self) -> VersionManifest:
        return self.buffer.manifest

    def close(self) -> None:
        """Gives the memory back."""
        self.buffer.close()
        if self.adapted is not None:
            self.adapted.close()


class WeightFetch:
    """One fetch of one version: run it once, in a thread; cancel it from any other."""

    def __init__(
        self,
        source: WeightSource,
        manifest: VersionManifest,
        base: VersionBuffer | None = None,
        fabric: FabricReceiver | None = None,
        adapted: VersionBuffer | None = None,
    ) -> None:
        """
        Args:
            base: an older version: only the differences are fetched. It belongs to this fetch, which closes it.
            adapted: what the version's adapters are added to, where it is here. It becomes part of what is fetched.
            fabric: this instance's place on `WeightSource.fabric`: what comes over it is not fetched.
        """
        self._source = source
        self._base = base
        self._fabric = fabric
        self._adapted = adapted
        self._adapted_fetch: WeightFetch | None = None
        self._manifest = manifest
        self._cancelled = threading.Event()
        self._damages = 0
        self._unreachable: list[str] = []
        self._call: Any = None  # the one that is open

    def cancel(self) -> None:
        """Makes `run` raise soon."""
        self._cancelled.set()
        if (call := self._call) is not None:
            call.cancel()
        if (adapted_fetch := self._adapted_fetch) is not None:
            adapted_fetch.cancel()
        if self._fabric is not None:
            self._fabric.cancel(self._manifest)

    def run(self) -> FetchedVersion:
        """
        Raises:
            WeightTransferError: cancelled, refused, out of patience, or a digest disagrees.
        """
        started = time.monotonic()
        version = self._manifest.weight_version
        try:
            if version_digest(self._manifest.tensors, self._manifest.adapter) != self._manifest.digest:
                raise WeightTransferError(f"the manifest of version {version} does not agree with its own digest")
            buffer = self._whole_buffer()
            try:
                # Afterwards, for it may take long: adapters are retired soon, what they are added to is not.
                if self._manifest.HasField("adapter"):
                    self._have_adapted()
            except BaseException:
                buffer.close()
                raise
        except BaseException:
            if self._adapted is not None:
                self._adapted.close()
            raise
        finally:
            if self._base is not None:
                self._base.close()
        fetch_s, manifest = time.monotonic() - started, self._manifest
        logger.debug("version=%d fetched: %d bytes in %.3f s", manifest.weight_version, manifest.num_bytes, fetch_s)
        return FetchedVersion(buffer, fetch_s, self._adapted)

    def _have_adapted(self) -> None:
        """Fetches what the adapters are added to, unless it is here, and sees whether they fit."""
        if self._adapted is None:
            self._adapted_fetch = WeightFetch(self._source, self._adapted_manifest())
            if self._cancelled.is_set():
                self._adapted_fetch.cancel()
            self._adapted = self._adapted_fetch.run().buffer
        reason = why_unfit(self._adapted.manifest, self._manifest)
        if reason is not None:
            raise WeightTransferError(f"version {self._manifest.weight_version} cannot be made: {reason}")

    def _adapted_manifest(self) -> VersionManifest:
        """Of what the adapters are added to.

        Raises:
            WeightTransferError: cancelled, or it was not to be had for `patience_s`.
        """
        adapter, patience = self._manifest.adapter, _Patience(self._source.patience_s, self._cancelled)
        request = self._request(adapter.base_weight_version)
        while True:
            try:
                return self._ask(request, adapter.base_digest).manifest
            except StaleAttemptError as error:
                raise WeightTransferError(str(error)) from error
            except (UnavailableError, RefusedError) as error:
                # One that has lost it is given it again by the trainer.
                patience.wait_after(error)

    def _whole_buffer(self) -> VersionBuffer:
        """The version itself."""
        version = self._manifest.weight_version
        buffer = VersionBuffer(self._manifest)
        try:
            if self._comes_over_fabric(buffer):
                return buffer
            assembly = VersionAssembly(buffer, self._base)
            patience = _Patience(self._source.patience_s, self._cancelled)
            while not assembly.complete:
                try:
                    self._stream(assembly, patience)
                except UnavailableError as error:
                    patience.wait_after(error)
                except RefusedError as error:
                    raise WeightTransferError(f"version {version} cannot be fetched: {error}") from error
                except WeightTransferError as error:
                    self._damages += 1
                    if self._damages > _MAX_DAMAGES:
                        raise
                    assembly.take_tensor_again()
                    patience.wait_after(error)
        except BaseException:
            buffer.close()
            raise
        return buffer

    def _comes_over_fabric(self, buffer: VersionBuffer) -> bool:
        """Whether the version has come by NCCL, whole and undamaged. If not, for whatever reason, it is fetched.

        Raises:
            WeightTransferError: the fetch was cancelled meanwhile.
        """
        if self._fabric is None or not self._fabric.ready:
            return False
        version = self._manifest.weight_version
        try:
            plan = self._negotiate(over_fabric=True)
            if plan.format == TRANSFER_FORMAT_NCCL:
                self._fabric.receive(plan.fabric_group, buffer, self._cancelled)
                return True
        except (UnavailableError, RefusedError) as error:
            logger.debug("version=%d was not negotiated over %s: %s", version, self._source.fabric, error)
        except FabricError as error:
            if not self._cancelled.is_set():
                logger.warning("version=%d does not come over %s, fetching it: %s", version, self._source.fabric, error)
        if self._cancelled.is_set():
            raise WeightTransferError("the fetch was cancelled")
        return False

    def _stream(self, assembly: VersionAssembly, patience: "_Patience") -> None:
        """Negotiates, and streams from where the assembly stands until it is complete or the stream breaks."""
        plan = self._negotiate()
        address = plan.source_address or self._source.address
        try:
            self._stream_from(address, plan, assembly, patience)
        except UnavailableError:
            if plan.source_address:
                self._unreachable.append(plan.source_address)
            raise

    def _stream_from(
        self, address: str, plan: NegotiateResponse, assembly: VersionAssembly, patience: "_Patience"
    ) -> None:
        with open_channel(address) as channel, peer_errors(f"weights_svc at {address}"):
            # Responses come serialised: their data is copied once, into the buffer.
            fetch = channel.unary_stream(_FETCH_METHOD, FetchRequest.SerializeToString, None)
            stream = fetch(
                FetchRequest(
                    run_id=self._source.run_id,
                    receiver=self._source.receiver,
                    weight_version=self._manifest.weight_version,
                    format=plan.format,
                    first_tensor_index=assembly.tensor_index,
                    first_offset=assembly.offset,
                    digest=self._manifest.digest,
                    base_weight_version=plan.base_weight_version,
                    base_digest="" if self._base is None else self._base.manifest.digest,
                    verify_first=self._damages > 0,
                ),
                timeout=_STREAM_DEADLINE_S,
            )
            with self._cancellable(stream):
                for message in stream:
                    assembly.add(_decoded(message))
                    patience.renew()
            if plan.format == TRANSFER_FORMAT_DELTA:
                assembly.finish_difference()
        if not assembly.complete:
            raise UnavailableError(f"weights_svc at {address} ended the stream at tensor {assembly.tensor_index}")

    def _negotiate(self, *, over_fabric: bool = False) -> NegotiateResponse:
        request = self._request(self._manifest.weight_version)
        if over_fabric and self._fabric is not None:
            request.formats.append(TRANSFER_FORMAT_NCCL)
            request.fabric, request.fabric_group = self._source.fabric, self._fabric.group
        if self._base is not None and self._damages == 0:
            request.formats.append(TRANSFER_FORMAT_DELTA)
            request.held_weight_version = self._base.manifest.weight_version
            request.held_digest = self._base.manifest.digest
        return self._ask(request, self._manifest.digest)

    def _request(self, weight_version: int) -> NegotiateRequest:
        """For a whole version."""
        source = self._source
        return NegotiateRequest(
            run_id=source.run_id,
            attempt=source.attempt,
            receiver=source.receiver,
            site=source.site,
            formats=[TRANSFER_FORMAT_FULL],
            exact_weight_version=weight_version,
            unreachable_addresses=self._unreachable,
            failed_group=b"" if self._fabric is None else self._fabric.failed_group,
        )

    def _ask(self, request: NegotiateRequest, digest: str) -> NegotiateResponse:
        """The plan for a version with this digest.

        Raises:
            RefusedError: it is not there.
            UnavailableError: weights_svc does not answer.
        """
        address = self._source.address
        with open_channel(address) as channel, peer_errors(f"weights_svc at {address}"):
            answer = WeightsServiceStub(channel).Negotiate.future(request, timeout=_NEGOTIATE_DEADLINE_S)
            with self._cancellable(answer):
                plan: NegotiateResponse = answer.result()
        if plan.manifest.digest != digest:
            raise RefusedError(f"it holds digest {plan.manifest.digest} instead of {digest}")
        return plan

    @contextmanager
    def _cancellable(self, call: Any) -> Iterator[None]:
        """`cancel` reaches the call inside the block; afterwards it is over in any case."""
        self._call = call
        try:
            if self._cancelled.is_set():
                call.cancel()
            yield
        except grpc.FutureCancelledError as error:
            raise UnavailableError("the call was cancelled") from error
        finally:
            self._call = None
            call.cancel()


def _decoded(message: bytes) -> FetchedChunk:
    """
    Raises:
        WeightTransferError: the message cannot be read.
    """
    try:
        return decode_fetch_response(message)
    except ValueError as error:
        raise WeightTransferError(str(error)) from error


class _Patience:
    """Decides when a source that does not answer is given up."""

    def __init__(self, patience_s: float, cancelled: threading.Event) -> None:
        self._patience_s = patience_s
        self._cancelled = cancelled
        self._last_progress = time.monotonic()

    def renew(self) -> None:
        """Something arrived."""
        self._last_progress = time.monotonic()

    def wait_after(self, error: StreamRLError) -> None:
        """Waits before the next try.

        Raises:
            WeightTransferError: cancelled, or nothing has come for too long.
        """
        if time.monotonic() - self._last_progress > self._patience_s:
            raise WeightTransferError(f"nothing came for {self._patience_s:.0f} s: {error}") from error
        logger.info("fetch interrupted, going on in %.1f s: %s", _RETRY_WAIT_S, error)
        if self._cancelled.wait(_RETRY_WAIT_S):
            raise WeightTransferError("the fetch was cancelled") from error
