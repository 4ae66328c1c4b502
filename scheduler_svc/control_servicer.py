"""SchedulerService: each call changes or reads the ledger at once and wakes the loop for what follows from it."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable

import grpc.aio

from scheduler_svc.fleet_view import fleet_view
from scheduler_svc.ledger import Ledger
from streamrl.errors import RefusedError
from streamrl.v1.scheduler_pb2 import (
    FLEET_PHASE_GENERATE,
    FLEET_PHASE_TRAIN,
    DrainRequest,
    DrainResponse,
    FleetPhase,
    GetFleetRequest,
    GetFleetResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    RegisterRequest,
    RegisterResponse,
    ReportBatchRequest,
    ReportBatchResponse,
    SetPhaseRequest,
    SetPhaseResponse,
)
from streamrl.v1.scheduler_pb2_grpc import SchedulerServiceServicer

logger = logging.getLogger(__name__)


class _Stream:
    """One open heartbeat stream."""

    def __init__(self) -> None:
        self.identity: tuple[str, int] | None = None
        """Instance and incarnation of its last request."""
        self.to_answer: asyncio.Queue[tuple[str, int] | None] = asyncio.Queue()
        """An identity to speak to for each answer that is due; None: the stream has ended."""

    def poke(self) -> None:
        """Has it say what is new, unless it is about to speak anyway."""
        if self.to_answer.empty() and self.identity is not None:
            self.to_answer.put_nowait(self.identity)


class SchedulerServicer(SchedulerServiceServicer):
    """Answers on the loop that owns the ledger."""

    def __init__(self, ledger: Ledger, wake: Callable[[], None]) -> None:
        """
        Args:
            wake: has the schedule loop decide again and then call `tell`.
        """
        self._ledger = ledger
        self._wake = wake
        self._streams: set[_Stream] = set()
        self._phase_calls: set[asyncio.Event] = set()

    def tell(self) -> None:
        """Passes on what is new since the last call: to instances, and to calls that wait for a phase."""
        news = {(life.name, life.incarnation): life for life in self._ledger.take_news()}
        for stream in self._streams:
            life = news.get(stream.identity) if stream.identity is not None else None
            if life is not None and (life.ended or life.heard_lately(time.monotonic())):
                stream.poke()
        for changed in self._phase_calls:
            changed.set()

    async def Register(
        self, request: RegisterRequest, context: grpc.aio.ServicerContext[RegisterRequest, RegisterResponse]
    ) -> RegisterResponse:
        response = self._ledger.register(request, time.monotonic())
        self._wake()
        return response

    async def Heartbeat(
        self,
        request_iterator: AsyncIterator[HeartbeatRequest],
        context: grpc.aio.ServicerContext[HeartbeatRequest, HeartbeatResponse],
    ) -> AsyncIterator[HeartbeatResponse]:
        """Answers each request, and speaks by itself when there is news."""
        stream = _Stream()
        self._streams.add(stream)
        listening = asyncio.create_task(self._listen(stream, request_iterator))
        try:
            while (identity := await stream.to_answer.get()) is not None:
                yield self._ledger.answer(*identity)
            await listening
        finally:
            listening.cancel()
            self._streams.discard(stream)

    async def _listen(self, stream: _Stream, requests: AsyncIterator[HeartbeatRequest]) -> None:
        try:
            async for request in requests:
                self._ledger.heartbeat(request, time.monotonic())
                stream.identity = (request.instance, request.incarnation)
                stream.to_answer.put_nowait(stream.identity)
                self._wake()
        finally:
            stream.to_answer.put_nowait(None)

    async def Drain(
        self, request: DrainRequest, context: grpc.aio.ServicerContext[DrainRequest, DrainResponse]
    ) -> DrainResponse:
        self._ledger.drain(request, time.monotonic())
        self._wake()
        return DrainResponse()

    async def ReportBatch(
        self, request: ReportBatchRequest, context: grpc.aio.ServicerContext[ReportBatchRequest, ReportBatchResponse]
    ) -> ReportBatchResponse:
        response = self._ledger.report(request)
        self._wake()
        return response

    async def SetPhase(
        self, request: SetPhaseRequest, context: grpc.aio.ServicerContext[SetPhaseRequest, SetPhaseResponse]
    ) -> SetPhaseResponse:
        """Answers when all instances have confirmed; the caller's deadline bounds the wait."""
        self._ledger.check_caller(request.run_id, request.attempt)
        if request.phase not in (FLEET_PHASE_GENERATE, FLEET_PHASE_TRAIN):
            raise ValueError(f"phase {request.phase} is unknown")
        self._ledger.set_phase(request.phase)
        self._wake()
        changed = asyncio.Event()
        self._phase_calls.add(changed)
        try:
            while not self._ledger.phase_reached(request.phase):
                if self._ledger.phase != request.phase:
                    raise RefusedError(f"{FleetPhase.Name(self._ledger.phase)} was asked for meanwhile")
                await changed.wait()
                changed.clear()
        finally:
            self._phase_calls.discard(changed)
        return SetPhaseResponse()

    async def GetFleet(
        self, request: GetFleetRequest, context: grpc.aio.ServicerContext[GetFleetRequest, GetFleetResponse]
    ) -> GetFleetResponse:
        if request.run_id != self._ledger.settings.run.id:
            raise RefusedError(f"this is the scheduler of run {self._ledger.settings.run.id!r}")
        return fleet_view(self._ledger, time.monotonic())
