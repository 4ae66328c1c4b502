"""Servers, channels and the error mapping, over a real connection."""

import asyncio
import socket
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from streamrl.errors import RefusedError, StaleAttemptError, StreamRLError, UnavailableError
from streamrl.rpc.channel import open_aio_channel, open_channel
from streamrl.rpc.errors import error_of, peer_errors, status_of
from streamrl.rpc.server import Server
from streamrl.v1 import weights_pb2, weights_pb2_grpc

NAME = "streamrl.v1.WeightsService"


class Weights(weights_pb2_grpc.WeightsServiceServicer):
    """Raises what it is given, at once or in the middle of a stream."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    async def ListVersions(self, request, context):
        if self.error:
            raise self.error
        return weights_pb2.ListVersionsResponse(bytes_sent=7)

    async def Watch(self, request, context) -> AsyncIterator[weights_pb2.WatchResponse]:
        yield weights_pb2.WatchResponse(weight_version=1)
        if self.error:
            raise self.error


async def served(error: Exception | None = None) -> tuple[Server, str]:
    server = Server(NAME, lambda s: weights_pb2_grpc.add_WeightsServiceServicer_to_server(Weights(error), s))
    return server, await server.serve("127.0.0.1:0")


@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        (ValueError("too short"), RefusedError, "INVALID_ARGUMENT.*too short"),
        (KeyError("version 3 is not held"), RefusedError, "NOT_FOUND.*version 3 is not held"),
        (FileExistsError("another digest"), RefusedError, "ALREADY_EXISTS.*another digest"),
        (StaleAttemptError("attempt 1, expected 2", 2), StaleAttemptError, "attempt 1, expected 2"),
        (RefusedError("wrong tokenizer"), RefusedError, "FAILED_PRECONDITION.*wrong tokenizer"),
        (UnavailableError("no version yet"), UnavailableError, "no version yet"),
        (ZeroDivisionError("bug"), RefusedError, "INTERNAL.*ZeroDivisionError: bug"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_what_a_servicer_raises_reaches_the_caller_as_one_of_our_errors(
    raised: Exception, kind: type[StreamRLError], message: str, streaming: bool
) -> None:
    async def scenario() -> None:
        server, address = await served(raised)
        async with open_aio_channel(address) as channel:
            stub = weights_pb2_grpc.WeightsServiceStub(channel)
            with pytest.raises(kind, match=message) as caught, peer_errors(f"weights_svc at {address}"):
                if streaming:
                    async for _ in stub.Watch(weights_pb2.WatchRequest(), timeout=10):
                        pass
                else:
                    await stub.ListVersions(weights_pb2.ListVersionsRequest(), timeout=10)
            assert address in str(caught.value)
            if isinstance(raised, StaleAttemptError):
                assert isinstance(caught.value, StaleAttemptError)
                assert caught.value.current_attempt == raised.current_attempt
        await server.stop()

    asyncio.run(scenario())


def test_a_peer_that_is_not_there_is_unavailable_for_sync_callers_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    with open_channel(address) as channel, pytest.raises(UnavailableError, match=address), peer_errors(address):
        weights_pb2_grpc.WeightsServiceStub(channel).ListVersions(weights_pb2.ListVersionsRequest(), timeout=5)


def test_a_method_that_a_service_lacks_is_refused() -> None:
    async def scenario() -> None:
        server, address = await served()
        async with open_aio_channel(address) as channel:
            with pytest.raises(RefusedError, match="UNIMPLEMENTED"), peer_errors(address):
                await weights_pb2_grpc.WeightsServiceStub(channel).Rewind(weights_pb2.RewindRequest(), timeout=10)
        await server.stop()

    asyncio.run(scenario())


def test_a_port_in_use_is_said_before_anything_is_served() -> None:
    async def scenario(taken: str) -> None:
        server = Server(NAME, lambda s: weights_pb2_grpc.add_WeightsServiceServicer_to_server(Weights(), s))
        with pytest.raises(ValueError, match=f"cannot listen on {taken}.*in use"):
            await server.serve(taken)
        await server.stop()

    with socket.create_server(("127.0.0.1", 0)) as taken:
        asyncio.run(scenario(f"127.0.0.1:{taken.getsockname()[1]}"))


def test_a_server_tells_its_health_and_its_services() -> None:
    async def scenario() -> None:
        server, address = await served()
        async with open_aio_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for name in ("", NAME):
                answer = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            async for answer in reflection.ServerReflectionInfo(iter([request]), timeout=10):
                assert NAME in {service.name for service in answer.list_services_response.service}
        await server.stop()

    asyncio.run(scenario())


def test_unknown_exceptions_never_pass_for_the_callers_fault() -> None:
    assert status_of(RuntimeError("x"))[0] is grpc.StatusCode.INTERNAL


def test_a_passed_deadline_may_be_tried_again() -> None:
    class Deadline(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.DEADLINE_EXCEEDED

        def details(self) -> str:
            return "Deadline Exceeded"

    assert isinstance(error_of(Deadline(), "scheduler_svc"), UnavailableError)
