"""One gRPC stream that carries bytes and does nothing else: the limit of what a service in Python can move.

`python -m benchmarks.peers.raw_stream PORT CHUNK_BYTES` serves until it is ended.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import grpc.aio

from streamrl.rpc.channel import MAX_MESSAGE_BYTES, open_channel

_SERVICE = "raw.Stream"


def pull(address: str, num_bytes: int) -> float:
    """Bytes a second from the server."""
    with open_channel(address) as channel:
        call = channel.unary_stream(f"/{_SERVICE}/Pull", None, None)
        started = time.perf_counter()
        received = sum(len(chunk) for chunk in call(str(num_bytes).encode()))
        return received / (time.perf_counter() - started)


def push(address: str, num_bytes: int, chunk_bytes: int) -> float:
    """Bytes a second to the server."""
    chunk = bytes(chunk_bytes)

    def chunks() -> Iterator[bytes]:
        for _ in range(num_bytes // chunk_bytes):
            yield chunk

    with open_channel(address) as channel:
        call = channel.stream_unary(f"/{_SERVICE}/Push", None, None)
        started = time.perf_counter()
        taken = int(call(chunks()))
        return taken / (time.perf_counter() - started)


async def _serve(port: int, chunk_bytes: int) -> None:
    chunk = bytes(chunk_bytes)

    async def send(request: bytes, _context: Any) -> AsyncIterator[bytes]:
        for _ in range(int(request) // chunk_bytes):
            yield chunk

    async def take(requests: AsyncIterator[bytes], _context: Any) -> bytes:
        num_bytes = 0
        async for request in requests:
            num_bytes += len(request)
        return str(num_bytes).encode()

    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ]
    )
    handlers = {
        "Pull": grpc.unary_stream_rpc_method_handler(send),
        "Push": grpc.stream_unary_rpc_method_handler(take),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1]), int(sys.argv[2])))
