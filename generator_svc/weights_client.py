"""An instance's questions to weights_svc that move no bulk data: which version, and what became of it.

The bytes themselves are weight_fetcher.py's affair.
"""

import asyncio
import logging
from typing import TYPE_CHECKING, cast

from generator_svc.patience import FIRST_PAUSE_S, patiently
from streamrl.errors import StaleAttemptError, UnavailableError
from streamrl.rpc.channel import open_aio_channel
from streamrl.rpc.errors import peer_errors
from streamrl.settings import RpcSection
from streamrl.v1.weights_pb2 import (
    TRANSFER_FORMAT_FULL,
    AcknowledgeRequest,
    NegotiateRequest,
    NegotiateResponse,
    WatchRequest,
    WatchResponse,
)
from streamrl.v1.weights_pb2_grpc import WeightsServiceStub

if TYPE_CHECKING:
    from streamrl.v1.weights_pb2_grpc import WeightsServiceAsyncStub

logger = logging.getLogger(__name__)


class WeightsClient:
    """Every call is tried again while weights_svc does not answer, for `rpc.patience_s`; then `UnavailableError`."""

    def __init__(self, rpc: RpcSection, *, run_id: str, attempt: int, receiver: str, site: str) -> None:
        """
        Args:
            receiver: the instance's name.
        """
        self._rpc = rpc
        self._run_id = run_id
        self._attempt = attempt
        self._receiver = receiver
        self._site = site
        self._peer = f"weights_svc at {rpc.weights_address}"
        self._channel = open_aio_channel(rpc.weights_address)
        self._stub = cast("WeightsServiceAsyncStub", WeightsServiceStub(self._channel))

    async def wait_for_first_version(self) -> None:
        """Waits until this attempt has a version, as long as the trainer takes to publish it. One that an earlier
        attempt has published may be of those that the run goes back behind.

        Raises:
            UnavailableError: weights_svc does not answer.
            StaleAttemptError: the run is in a later attempt.
        """
        while True:
            try:
                async with asyncio.timeout(self._rpc.patience_s):
                    await self._channel.channel_ready()
            except TimeoutError:
                raise UnavailableError(f"{self._peer} does not answer") from None
            try:
                with peer_errors(self._peer):
                    call = self._stub.Watch(WatchRequest(run_id=self._run_id, watcher=self._receiver))
                    while isinstance(announcement := await call.read(), WatchResponse):
                        if announcement.attempt >= self._attempt:
                            call.cancel()
                            self._check_attempt(announcement)
                            return
            except UnavailableError as error:
                logger.info("watching for the first version again: %s", error)
            await asyncio.sleep(FIRST_PAUSE_S)

    def _check_attempt(self, announcement: WatchResponse) -> None:
        if announcement.attempt > self._attempt:
            raise StaleAttemptError(
                f"version {announcement.weight_version} is of attempt {announcement.attempt}, and this instance is of "
                f"attempt {self._attempt}: the run was resumed",
                announcement.attempt,
            )

    async def negotiate(
        self, *, at_least: int = 0, exactly: int | None = None, with_files: bool = False
    ) -> NegotiateResponse:
        """The newest version of at least this number, or exactly that one.

        Raises:
            RefusedError: there is none.
        """
        request = NegotiateRequest(
            run_id=self._run_id,
            attempt=self._attempt,
            receiver=self._receiver,
            site=self._site,
            formats=[TRANSFER_FORMAT_FULL],
            min_weight_version=at_least,
            exact_weight_version=exactly,
            with_files=with_files,
        )

        async def call() -> NegotiateResponse:
            with peer_errors(self._peer):
                return await self._stub.Negotiate(request, timeout=self._rpc.deadline_s)

        return await patiently(call, self._rpc.patience_s)

    async def acknowledge(self, outcome: AcknowledgeRequest) -> None:
        """Tells that a version is loaded.

        Args:
            outcome: without run, attempt and receiver.
        """
        request = AcknowledgeRequest(run_id=self._run_id, attempt=self._attempt, receiver=self._receiver)
        request.MergeFrom(outcome)

        async def call() -> None:
            with peer_errors(self._peer):
                await self._stub.Acknowledge(request, timeout=self._rpc.deadline_s)

        await patiently(call, self._rpc.patience_s)

    async def close(self) -> None:
        await self._channel.close(None)
