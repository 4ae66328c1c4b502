"""Channels to a service, sync and asyncio, with the same options."""

import grpc
import grpc.aio

from streamrl.rpc.trust import SERVER_NAME, Identity, own_identity

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Both ends allow this; bulk data goes in chunks far below it, a manifest of 20,000 tensors fits."""

_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # A service that comes back is found within a second or two.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),
]

_SECURE_OPTIONS = [("grpc.ssl_target_name_override", SERVER_NAME)]


def open_channel(address: str) -> grpc.Channel:
    """A channel for threads, with this process's identity (trust.py). Close it."""
    if (identity := own_identity()) is None:
        return grpc.insecure_channel(address, options=_OPTIONS)
    return grpc.secure_channel(address, _credentials(identity), options=[*_OPTIONS, *_SECURE_OPTIONS])


def open_aio_channel(address: str, *, own_connection: bool = False) -> grpc.aio.Channel:
    """A channel for asyncio, likewise. Close it.

    Args:
        own_connection: share no connection with other channels to the address.
    """
    options = [*_OPTIONS, ("grpc.use_local_subchannel_pool", int(own_connection))]
    if (identity := own_identity()) is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, _credentials(identity), options=[*options, *_SECURE_OPTIONS])


def _credentials(identity: Identity) -> grpc.ChannelCredentials:
    """TLS with this side's certificate, and the token with every call."""
    tls = grpc.ssl_channel_credentials(identity.ca, identity.key, identity.certificate)
    return grpc.composite_channel_credentials(tls, grpc.access_token_call_credentials(identity.token))
