"""Which version an instance may start with."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from generator_svc.weights_client import WeightsClient
from streamrl.errors import StaleAttemptError
from streamrl.rpc.server import Server
from streamrl.settings import RpcSection
from streamrl.v1.weights_pb2 import WatchRequest, WatchResponse
from streamrl.v1.weights_pb2_grpc import WeightsServiceServicer, add_WeightsServiceServicer_to_server


class Announcer(WeightsServiceServicer):
    """Announces what is put into it."""

    def __init__(self) -> None:
        self.announcements: asyncio.Queue[WatchResponse] = asyncio.Queue()

    async def Watch(self, request: WatchRequest, context: Any) -> AsyncIterator[WatchResponse]:
        while True:
            yield await self.announcements.get()
            self.announcements.task_done()

    def announce(self, weight_version: int, attempt: int) -> None:
        self.announcements.put_nowait(WatchResponse(weight_version=weight_version, attempt=attempt))


@asynccontextmanager
async def _client(announced: Sequence[tuple[int, int]], attempt: int) -> AsyncIterator[tuple[WeightsClient, Announcer]]:
    announcer = Announcer()
    for weight_version, of_attempt in announced:
        announcer.announce(weight_version, of_attempt)
    server = Server(
        "streamrl.v1.WeightsService", lambda grpc_server: add_WeightsServiceServicer_to_server(announcer, grpc_server)
    )
    address = await server.serve("127.0.0.1:0")
    client = WeightsClient(
        RpcSection(weights_address=address, patience_s=20), run_id="r", attempt=attempt, receiver="g", site=""
    )
    try:
        yield client, announcer
    finally:
        await client.close()
        await server.stop()


async def test_a_version_that_an_earlier_attempt_published_is_none_to_start_with() -> None:
    async with _client([(6, 1)], attempt=2) as (client, announcer):
        waiting = asyncio.create_task(client.wait_for_first_version())
        # Forgotten versions, then the checkpoint's as the earlier attempt had published it.
        announcer.announce(4, 1)
        await asyncio.wait_for(announcer.announcements.join(), 20)
        assert not waiting.done()
        announcer.announce(4, 2)
        await asyncio.wait_for(waiting, 20)


async def test_a_version_of_a_later_attempt_says_that_this_one_is_over() -> None:
    async with _client([(4, 3)], attempt=2) as (client, _):
        with pytest.raises(StaleAttemptError, match="version 4 is of attempt 3") as raised:
            await client.wait_for_first_version()
        assert raised.value.current_attempt == 3
