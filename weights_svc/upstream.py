"""A relay's connection to the weights_svc that it takes its versions from."""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, cast

from streamrl.rpc.channel import open_aio_channel
from streamrl.rpc.errors import peer_errors
from streamrl.v1.weights_pb2 import (
    AcknowledgeRequest,
    FetchRequest,
    ListVersionsRequest,
    NegotiateRequest,
    NegotiateResponse,
    VersionManifest,
    WatchRequest,
    WatchResponse,
)
from streamrl.v1.weights_pb2_grpc import WeightsServiceStub

if TYPE_CHECKING:
    from streamrl.v1.weights_pb2_grpc import WeightsServiceAsyncStub

_FETCH_METHOD = "/streamrl.v1.WeightsService/Fetch"
_STREAM_DEADLINE_S = 600.0
"""A stream that is still moving then goes on with the next call; one that hangs ends with its connection's keepalive.
"""


class Upstream:
    """Every call raises UnavailableError when the upstream does not answer, and RefusedError when it says no. Belongs
    to one event loop."""

    def __init__(
        self,
        address: str,
        *,
        run_id: str,
        receiver: str,
        site: str,
        serving_address: str,
        deadline_s: float,
        num_connections: int,
    ) -> None:
        """
        Args:
            receiver: this relay's name.
            serving_address: host:port where it hands versions out; empty: where nobody else finds it.
            num_connections: of bulk data.
        """
        self.name = f"weights_svc at {address}"
        self._run_id = run_id
        self._receiver = receiver
        self._site = site
        self._serving_address = serving_address
        self._deadline_s = deadline_s
        self._channel = open_aio_channel(address)
        self._stub = cast("WeightsServiceAsyncStub", WeightsServiceStub(self._channel))
        self._bulk_channels = [open_aio_channel(address, own_connection=True) for _ in range(num_connections)]

    @property
    def num_connections(self) -> int:
        """Of bulk data."""
        return len(self._bulk_channels)

    async def watch(self) -> AsyncIterator[WatchResponse]:
        """The newest version, then each later one, as long as the upstream is there."""
        with peer_errors(self.name):
            call = self._stub.Watch(WatchRequest(run_id=self._run_id, watcher=self._receiver))
            async for announcement in call:
                yield announcement

    async def negotiate(self, request: NegotiateRequest) -> NegotiateResponse:
        """
        Args:
            request: without run and receiver.
        """
        request.run_id, request.receiver, request.site = self._run_id, self._receiver, self._site
        request.serving_address = self._serving_address
        with peer_errors(self.name):
            return await self._stub.Negotiate(request, timeout=self._deadline_s)

    async def fetch(self, request: FetchRequest, connection: int) -> AsyncGenerator[bytes, None]:
        """The responses, serialised.

        Args:
            request: without run and receiver.
            connection: over which of the connections.
        """
        request.run_id, request.receiver = self._run_id, self._receiver
        with peer_errors(self.name):
            call = self._bulk_channels[connection].unary_stream(_FETCH_METHOD, FetchRequest.SerializeToString, None)(
                request, timeout=_STREAM_DEADLINE_S
            )
            try:
                async for message in call:
                    yield message
            finally:
                call.cancel()

    async def acknowledge(self, request: AcknowledgeRequest) -> None:
        """Passes on what a receiver has loaded, or tells what this relay holds when it names no receiver."""
        request.run_id, request.receiver = self._run_id, request.receiver or self._receiver
        with peer_errors(self.name):
            await self._stub.Acknowledge(request, timeout=self._deadline_s)

    async def versions(self) -> dict[int, VersionManifest]:
        """What the upstream holds."""
        with peer_errors(self.name):
            listed = await self._stub.ListVersions(ListVersionsRequest(run_id=self._run_id), timeout=self._deadline_s)
        return {manifest.weight_version: manifest for manifest in listed.versions}

    async def close(self) -> None:
        for channel in (self._channel, *self._bulk_channels):
            await channel.close(None)
