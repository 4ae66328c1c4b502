"""A version in stripes over several connections: nothing is lost, doubled or out of order, and memory is bounded."""

import asyncio
import random
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import UnavailableError
from streamrl.v1.weights_pb2 import FetchRequest
from weights_svc.lanes import fetch_in_lanes, requests_for, stripe_starts
from weights_svc.outgoing import Position


@given(st.lists(st.integers(0, 100), min_size=1, max_size=8), st.data())
def test_stripes_cover_a_version_from_any_position_on(tensor_bytes, data):
    index = data.draw(st.integers(0, len(tensor_bytes) - 1))
    first = Position(index, data.draw(st.integers(0, tensor_bytes[index])))
    starts = stripe_starts(tensor_bytes, first, stripe_bytes=24)
    ends = [*starts[1:], Position(len(tensor_bytes), 0)]
    before = [sum(tensor_bytes[:index]) for index in range(len(tensor_bytes) + 1)]
    assert starts[0] == first
    for start, end in zip(starts, ends, strict=True):
        assert 0 < before[end.tensor_index] + end.offset - before[start.tensor_index] - start.offset <= 24 or (
            start == starts[-1] and start <= end
        )
    if first.offset % 8 == 0:
        assert all(start.offset % 8 == 0 for start in starts)


class Source:
    """An upstream whose streams take their time, one message a byte of the stripe."""

    def __init__(self) -> None:
        self.open: set[int] = set()
        self.connections: set[int] = set()
        self.num_sent = 0
        self.breaks_at: int | None = None

    async def fetch(self, request: FetchRequest, connection: int) -> AsyncGenerator[bytes, None]:
        self.connections.add(connection)
        self.open.add(request.first_offset)
        try:
            end = request.end_offset if request.end_tensor_index == 0 else 40
            for offset in range(request.first_offset, end):
                await asyncio.sleep(random.random() / 5000)
                if offset == self.breaks_at:
                    raise UnavailableError("the line broke")
                self.num_sent += 1
                yield bytes([offset])
        finally:
            self.open.discard(request.first_offset)


async def no_pause(_message: bytes) -> None:
    pass


REQUESTS = requests_for(FetchRequest(weight_version=3), [Position(0, offset) for offset in range(0, 40, 4)], 1)


async def test_what_lanes_bring_comes_in_order_over_all_connections():
    source = Source()
    brought = [message async for message in fetch_in_lanes(source.fetch, REQUESTS, 3, no_pause)]
    assert b"".join(brought) == bytes(range(40))
    assert source.connections == {0, 1, 2}
    assert all(request.weight_version == 3 for request in REQUESTS)


async def test_a_lane_that_breaks_ends_the_fetch_behind_what_came_before():
    source = Source()
    source.breaks_at = 14
    brought = b""
    with pytest.raises(UnavailableError):
        async for message in fetch_in_lanes(source.fetch, REQUESTS, 2, no_pause):
            brought += message
    assert brought == bytes(range(14))
    assert not source.open


async def test_lanes_run_no_further_ahead_than_a_stripe_each():
    source = Source()
    messages = fetch_in_lanes(source.fetch, REQUESTS, 2, no_pause)
    assert await anext(messages) == bytes([0])
    await asyncio.sleep(0.1)
    assert source.num_sent == 4 * 4
    await messages.aclose()
    assert not source.open
