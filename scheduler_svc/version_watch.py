"""Listens to weights_svc for new versions, for as long as the service lives."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import grpc.aio

from streamrl.errors import UnavailableError
from streamrl.rpc.channel import open_aio_channel
from streamrl.rpc.errors import peer_errors
from streamrl.settings import RpcSection
from streamrl.v1.weights_pb2 import WatchRequest, WatchResponse
from streamrl.v1.weights_pb2_grpc import WeightsServiceStub

if TYPE_CHECKING:
    from streamrl.v1.weights_pb2_grpc import WeightsServiceAsyncStub

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_STEADY_S = 5.0
"""A stream that held this long was a good one: what breaks later is a new interruption."""


async def watch_versions(
    rpc: RpcSection, run_id: str, watcher: str, on_version: Callable[[WatchResponse], None]
) -> None:
    """Hands on each announcement, and after a break the newest again. It never returns.

    Raises:
        UnavailableError: weights_svc did not answer for `rpc.patience_s`.
        RefusedError: it answered no.
    """
    lost_at = time.monotonic()
    async with open_aio_channel(rpc.weights_address) as channel:
        while True:
            began_at: float | None = None
            try:
                await _connected(channel, rpc.weights_address, lost_at + rpc.patience_s - time.monotonic())
                began_at = time.monotonic()
                await _follow(channel, rpc.weights_address, run_id, watcher, on_version)
            except UnavailableError as error:
                now = time.monotonic()
                if began_at is not None and now - began_at > _STEADY_S:
                    lost_at = now
                if now - lost_at >= rpc.patience_s:
                    raise
                logger.warning("%s; trying again for %.0f s", error, rpc.patience_s - (now - lost_at))
            await asyncio.sleep(_RETRY_S)


async def _connected(channel: grpc.aio.Channel, address: str, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(channel.channel_ready(), max(timeout_s, 0.0))
    except TimeoutError as error:
        raise UnavailableError(f"weights_svc at {address} does not answer") from error


async def _follow(
    channel: grpc.aio.Channel, address: str, run_id: str, watcher: str, on_version: Callable[[WatchResponse], None]
) -> None:
    with peer_errors(f"weights_svc at {address}"):
        # The stream has no deadline: keepalive pings find out when the peer is gone.
        stub = cast("WeightsServiceAsyncStub", WeightsServiceStub(channel))
        async for announced in stub.Watch(WatchRequest(run_id=run_id, watcher=watcher)):
            on_version(announced)
    # A service that stops in order ends its streams without an error.
    raise UnavailableError(f"weights_svc at {address} ended the stream")
