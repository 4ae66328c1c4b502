"""A gRPC server (asyncio) with health, reflection and our error mapping."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from streamrl.rpc.channel import MAX_MESSAGE_BYTES
from streamrl.rpc.errors import status_of
from streamrl.rpc.trust import authorize, own_identity

logger = logging.getLogger(__name__)

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class Server:
    """One service's server. Healthy from `serve` until `stop`."""

    def __init__(self, service_name: str, register: Callable[[grpc.aio.Server], None]) -> None:
        """
        Args:
            service_name: full name, such as "streamrl.v1.WeightsService".
            register: adds the servicer, by the generated `add_…Servicer_to_server`.
        """
        self._service_name = service_name
        self._server = grpc.aio.server(
            interceptors=[_ErrorMapping()],
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 5000),
            ],
        )
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        register(self._server)
        reflection.enable_server_reflection((service_name, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)

    async def serve(self, address: str) -> str:
        """Starts to listen.

        Args:
            address: "host:port"; port 0 takes a free one.

        Returns:
            The address with its real port.

        Raises:
            ValueError: the port is in use or the host is not this machine's.
        """
        host = address.rpartition(":")[0]
        try:
            port = self._add_port(address)
        except RuntimeError:
            port = 0
        if port == 0:
            raise ValueError(
                f"{self._service_name} cannot listen on {address}: the port is in use or the host is not this "
                f"machine's. Choose another address, or port 0 for a free one."
            )
        await self._server.start()
        for name in ("", self._service_name):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        speaks = "plaintext" if own_identity() is None else "TLS"
        logger.info("%s listens on %s:%d (%s)", self._service_name, host, port, speaks)
        return f"{host}:{port}"

    def _add_port(self, address: str) -> int:
        if (identity := own_identity()) is None:
            return self._server.add_insecure_port(address)
        credentials = grpc.ssl_server_credentials(
            [(identity.key, identity.certificate)], root_certificates=identity.ca, require_client_auth=True
        )
        return self._server.add_secure_port(address, credentials)

    async def stop(self, grace_s: float = 0.5) -> None:
        """Refuses new calls and ends the open ones within `grace_s`."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


class _ErrorMapping(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Answers a servicer's exception with its status code, and logs those that we did not foresee."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        details: grpc.HandlerCallDetails,
    ) -> _Handler:
        handler = await continuation(details)
        if handler is None or not details.method.startswith("/streamrl."):
            return handler
        if handler.response_streaming:
            wrap, make = _wrap_streaming, _STREAMING[handler.request_streaming]
            behaviour = handler.stream_stream if handler.request_streaming else handler.unary_stream
        else:
            wrap, make = _wrap_unary, _UNARY[handler.request_streaming]
            behaviour = handler.stream_unary if handler.request_streaming else handler.unary_unary
        return make(
            wrap(behaviour, details.method),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


_UNARY = {False: grpc.unary_unary_rpc_method_handler, True: grpc.stream_unary_rpc_method_handler}
_STREAMING = {False: grpc.unary_stream_rpc_method_handler, True: grpc.stream_stream_rpc_method_handler}


def _wrap_unary(behaviour: Any, method: str) -> Any:
    async def call(request: Any, context: _Context) -> Any:
        try:
            _authorize(method, context)
            return await behaviour(request, context)
        except Exception as error:  # the edge: whatever a servicer raises becomes a status
            await _abort(error, method, context)

    return call


def _wrap_streaming(behaviour: Any, method: str) -> Any:
    async def call(request: Any, context: _Context) -> AsyncIterator[Any]:
        try:
            _authorize(method, context)
            async for response in behaviour(request, context):
                yield response
        except Exception as error:  # the edge, as above
            await _abort(error, method, context)

    return call


def _authorize(method: str, context: _Context) -> None:
    """Raises RefusedError when this process has an identity and the caller's does not suffice."""
    if (identity := own_identity()) is None:
        return
    certified = context.auth_context().get("x509_common_name", ())
    authorize(identity, method, context.invocation_metadata() or (), [name.decode() for name in certified])


async def _abort(error: Exception, method: str, context: _Context) -> None:
    if isinstance(error, grpc.aio.AbortError | grpc.RpcError):
        raise error
    code, message = status_of(error)
    if code is grpc.StatusCode.INTERNAL:
        logger.exception("%s failed", method)
    else:
        logger.warning("%s of %s refused (%s): %s", method, context.peer(), code.name, message)
    await context.abort(code, message)
