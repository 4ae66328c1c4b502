"""TrainerService: status and control of the training loop over gRPC."""

import os
from typing import Any, TypeAlias

import grpc

from streamrl.v1 import trainer_pb2 as messages
from streamrl.v1.trainer_pb2_grpc import TrainerServiceServicer
from trainer_svc.control import STOP_PATIENCE_S, TrainerControl

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_ENDS = ("checkpointing", "done")
"""States that say more of a trainer that is asked to stop than that it is."""


class ControlServicer(TrainerServiceServicer):
    """Answers from the control object; nothing here waits for the training loop."""

    def __init__(
        self,
        control: TrainerControl,
        *,
        run_id: str,
        attempt: int,
        num_iterations: int,
    ) -> None:
        self._control = control
        self._run_id = run_id
        self._attempt = attempt
        self._num_iterations = num_iterations

    async def GetStatus(
        self, request: messages.TrainerServiceGetStatusRequest, context: Context
    ) -> messages.TrainerServiceGetStatusResponse:
        status = self._control.status()
        return messages.TrainerServiceGetStatusResponse(
            run_id=self._run_id,
            pid=os.getpid(),
            attempt=self._attempt,
            state="stopping" if self._control.stop_asked() and status.state not in _ENDS else status.state,
            waits_for=status.waits_for,
            iteration=status.iteration,
            num_iterations=self._num_iterations,
            weight_version=status.weight_version,
            waiting_rollouts=status.waiting_rollouts,
            metrics=status.metrics,
            notes=status.notes,
        )

    async def Pause(
        self, request: messages.TrainerServicePauseRequest, context: Context
    ) -> messages.TrainerServicePauseResponse:
        self._control.pause(request.lease_s)
        return messages.TrainerServicePauseResponse()

    async def Resume(
        self, request: messages.TrainerServiceResumeRequest, context: Context
    ) -> messages.TrainerServiceResumeResponse:
        self._control.resume()
        return messages.TrainerServiceResumeResponse()

    async def Checkpoint(
        self, request: messages.TrainerServiceCheckpointRequest, context: Context
    ) -> messages.TrainerServiceCheckpointResponse:
        self._control.ask_checkpoint()
        return messages.TrainerServiceCheckpointResponse()

    async def Stop(
        self, request: messages.TrainerServiceStopRequest, context: Context
    ) -> messages.TrainerServiceStopResponse:
        self._control.ask_stop(0.0 if request.at_once else STOP_PATIENCE_S)
        return messages.TrainerServiceStopResponse()
