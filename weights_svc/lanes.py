"""One version over several connections at once: on a long line a single one cannot keep enough bytes under way.

The version is cut into stripes, which lanes take in turn; what they bring is handed on in the version's order. A lane
holds one stripe at most, so memory is bounded however large the version is. Each connection has two lanes: while one
waits for the first byte of a stripe, the other one uses the line.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing

from streamrl.v1.weights_pb2 import FetchRequest
from weights_svc.outgoing import Position

STRIPE_BYTES = 8 * 1024 * 1024
_LANES_A_CONNECTION = 2
_ALIGNMENT_BYTES = 8
"""No item of any dtype is cut."""

Fetch = Callable[[FetchRequest, int], AsyncGenerator[bytes, None]]
"""Opens a stream over one of the connections."""
Pace = Callable[[bytes], Awaitable[None]]
"""Waits after a message until the next may come."""


def stripe_starts(tensor_bytes: Sequence[int], first: Position, stripe_bytes: int) -> list[Position]:
    """Where each stripe of a version begins: they cover it from `first` on, each of `stripe_bytes` or a little less.

    Args:
        tensor_bytes: length of each tensor's data.
        stripe_bytes: a multiple of 8.
    """
    starts, room = [first], stripe_bytes
    for index in range(first.tensor_index, len(tensor_bytes)):
        offset = first.offset if index == first.tensor_index else 0
        while (left := tensor_bytes[index] - offset) > room:
            offset += room
            starts.append(Position(index, offset))
            room = stripe_bytes
        room -= -(-left // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return starts


def requests_for(request: FetchRequest, starts: Sequence[Position], num_tensors: int) -> list[FetchRequest]:
    """One for each stripe. A single one says no end, which older services do not know."""
    requests = []
    for start, end in zip(starts, [*starts[1:], Position(num_tensors, 0)], strict=True):
        part = FetchRequest()
        part.CopyFrom(request)
        part.first_tensor_index, part.first_offset = start
        if len(starts) > 1:
            part.end_tensor_index, part.end_offset = end
        requests.append(part)
    return requests


async def fetch_in_lanes(
    fetch: Fetch, requests: Sequence[FetchRequest], num_connections: int, pace: Pace
) -> AsyncGenerator[bytes, None]:
    """The messages of all stripes, in order.

    Raises:
        What `fetch` raises, when it is that stripe's turn: what lanes hold of later ones is lost with it.
    """
    num_lanes = min(_LANES_A_CONNECTION * num_connections, len(requests))
    lanes = [_Lane(fetch, requests[lane::num_lanes], lane % num_connections, pace) for lane in range(num_lanes)]
    try:
        for number in range(len(requests)):
            while (message := await lanes[number % num_lanes].next_of_stripe()) is not None:
                yield message
    finally:
        await asyncio.gather(*(lane.close() for lane in lanes))


class _Lane:
    """Fetches its stripes one after the other, the next one when this one has been taken."""

    def __init__(self, fetch: Fetch, requests: Iterable[FetchRequest], connection: int, pace: Pace) -> None:
        self._messages: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self._taken = asyncio.Semaphore(1)
        self._task = asyncio.create_task(self._run(fetch, requests, connection, pace))

    async def next_of_stripe(self) -> bytes | None:
        """None at the stripe's end."""
        message = await self._messages.get()
        if isinstance(message, Exception):
            raise message
        if message is None:
            self._taken.release()
        return message

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, fetch: Fetch, requests: Iterable[FetchRequest], connection: int, pace: Pace) -> None:
        try:
            for request in requests:
                await self._taken.acquire()
                async with aclosing(fetch(request, connection)) as stream:
                    async for message in stream:
                        self._messages.put_nowait(message)
                        await pace(message)
                self._messages.put_nowait(None)
        except Exception as error:  # whatever it is, it is for whoever waits for the next message
            self._messages.put_nowait(error)
