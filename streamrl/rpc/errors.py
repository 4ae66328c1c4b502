"""Errors to status codes and back. The one place for both ways."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from streamrl.errors import (
    ForbiddenError,
    RefusedError,
    StaleAttemptError,
    StreamRLError,
    UnauthenticatedError,
    UnavailableError,
    WeightTransferError,
)
from streamrl.rpc.handshake import why_no_handshake

_STALE_ATTEMPT = re.compile(r"stale attempt \(now (\d+)\): ")

_UNAVAILABLE = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED, grpc.StatusCode.ABORTED}
)


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """The status code and details that a servicer answers with when it raises."""
    if isinstance(error, StaleAttemptError):
        return grpc.StatusCode.FAILED_PRECONDITION, f"stale attempt (now {error.current_attempt}): {error}"
    if isinstance(error, UnauthenticatedError):
        return grpc.StatusCode.UNAUTHENTICATED, str(error)
    if isinstance(error, ForbiddenError):
        return grpc.StatusCode.PERMISSION_DENIED, str(error)
    if isinstance(error, RefusedError):
        return grpc.StatusCode.FAILED_PRECONDITION, str(error)
    if isinstance(error, LookupError):
        return grpc.StatusCode.NOT_FOUND, str(error.args[0] if error.args else error)
    if isinstance(error, FileExistsError):
        return grpc.StatusCode.ALREADY_EXISTS, str(error)
    if isinstance(error, ValueError):
        return grpc.StatusCode.INVALID_ARGUMENT, str(error)
    if isinstance(error, NotImplementedError):
        return grpc.StatusCode.UNIMPLEMENTED, "this service does not have that method"
    if isinstance(error, UnavailableError):
        return grpc.StatusCode.UNAVAILABLE, str(error)
    if isinstance(error, WeightTransferError):
        return grpc.StatusCode.DATA_LOSS, str(error)
    return grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"


def error_of(error: grpc.RpcError, peer: str) -> StreamRLError:
    """What a failed call means to the caller.

    Args:
        peer: service and address, "weights_svc at HOST:PORT".
    """
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE and (reason := why_no_handshake(peer.rpartition(" ")[2], details)):
        return UnauthenticatedError(f"{peer} refused: {reason}")
    if code in _UNAVAILABLE:
        return UnavailableError(f"{peer} does not answer ({code.name}): {details}")
    if stale := _STALE_ATTEMPT.match(details):
        return StaleAttemptError(f"{peer} refused: {details[stale.end() :]}", int(stale[1]))
    if code is grpc.StatusCode.DATA_LOSS:
        return WeightTransferError(f"{peer}: {details}")
    return RefusedError(f"{peer} refused ({code.name}): {details}")


@contextmanager
def peer_errors(peer: str) -> Iterator[None]:
    """Turns gRPC's errors inside the block, sync or async, into ours.

    Raises:
        UnavailableError: the peer does not answer.
        RefusedError: it answered no.
        WeightTransferError: data of a weight version was damaged on the way or where it lies.
    """
    try:
        yield
    except grpc.RpcError as error:
        raise error_of(error, peer) from error
