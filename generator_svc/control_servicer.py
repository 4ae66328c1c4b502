"""GeneratorService: status, pause, resume and drain of this instance."""

import asyncio
import os

import grpc.aio

from generator_svc.generate_loop import GenerateLoop
from generator_svc.membership import Membership
from generator_svc.weight_switch import WeightSwitch
from streamrl.errors import UnavailableError
from streamrl.v1.generator_pb2 import (
    GeneratorServiceDrainRequest,
    GeneratorServiceDrainResponse,
    GeneratorServiceGetStatusRequest,
    GeneratorServiceGetStatusResponse,
    GeneratorServicePauseRequest,
    GeneratorServicePauseResponse,
    GeneratorServiceResumeRequest,
    GeneratorServiceResumeResponse,
)
from streamrl.v1.generator_pb2_grpc import GeneratorServiceServicer


class ControlServicer(GeneratorServiceServicer):
    """Answers from the start on; what it controls comes later, with `control`."""

    def __init__(self, run_id: str, instance: str, stop: asyncio.Event) -> None:
        """
        Args:
            stop: set to drain the instance.
        """
        self._run_id = run_id
        self._instance = instance
        self._stop = stop
        self._controlled: tuple[GenerateLoop, Membership, WeightSwitch] | None = None

    def control(self, loop: GenerateLoop, membership: Membership, weights: WeightSwitch) -> None:
        """The instance has started."""
        self._controlled = (loop, membership, weights)

    async def GetStatus(
        self,
        request: GeneratorServiceGetStatusRequest,
        context: grpc.aio.ServicerContext[GeneratorServiceGetStatusRequest, GeneratorServiceGetStatusResponse],
    ) -> GeneratorServiceGetStatusResponse:
        status = GeneratorServiceGetStatusResponse(
            run_id=self._run_id, instance=self._instance, pid=os.getpid(), state="starting", weight_version=-1
        )
        if self._controlled is not None:
            loop, membership, weights = self._controlled
            status.state = loop.state
            status.incarnation = membership.incarnation
            status.weight_version = weights.loaded
            status.running, status.waiting = loop.num_running, loop.num_waiting
        return status

    async def Pause(
        self,
        request: GeneratorServicePauseRequest,
        context: grpc.aio.ServicerContext[GeneratorServicePauseRequest, GeneratorServicePauseResponse],
    ) -> GeneratorServicePauseResponse:
        if self._controlled is None:
            raise UnavailableError("the instance is starting")
        loop, _, _ = self._controlled
        await loop.standstill.pause(request.lease_s)
        return GeneratorServicePauseResponse()

    async def Resume(
        self,
        request: GeneratorServiceResumeRequest,
        context: grpc.aio.ServicerContext[GeneratorServiceResumeRequest, GeneratorServiceResumeResponse],
    ) -> GeneratorServiceResumeResponse:
        if self._controlled is not None:
            loop, _, _ = self._controlled
            loop.standstill.resume()
        return GeneratorServiceResumeResponse()

    async def Drain(
        self,
        request: GeneratorServiceDrainRequest,
        context: grpc.aio.ServicerContext[GeneratorServiceDrainRequest, GeneratorServiceDrainResponse],
    ) -> GeneratorServiceDrainResponse:
        self._stop.set()
        return GeneratorServiceDrainResponse()
