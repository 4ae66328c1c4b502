"""What a run does now, asked of its trainer and its scheduler; and what they are told: to stop, and who died."""

import asyncio
import logging
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, cast

from streamrl.errors import StreamRLError
from streamrl.rpc.channel import open_aio_channel
from streamrl.rpc.errors import peer_errors
from streamrl.v1.scheduler_pb2 import DrainRequest, GetFleetRequest, GetFleetResponse, InstanceState
from streamrl.v1.scheduler_pb2_grpc import SchedulerServiceStub
from streamrl.v1.trainer_pb2 import (
    TrainerServiceGetStatusRequest,
    TrainerServiceGetStatusResponse,
    TrainerServiceStopRequest,
)
from streamrl.v1.trainer_pb2_grpc import TrainerServiceStub

if TYPE_CHECKING:
    from streamrl.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub
    from streamrl.v1.trainer_pb2_grpc import TrainerServiceAsyncStub

logger = logging.getLogger(__name__)

_DEADLINE_S = 2.0


@dataclass(frozen=True)
class Observation:
    """What two services said about a run."""

    trainer: TrainerServiceGetStatusResponse | None
    """Its last answer; None before the first."""
    fleet: GetFleetResponse | None
    """None: the scheduler does not answer."""
    trainer_answers: bool = True
    """Whether the trainer's last answer is one to the last question."""


class Observer:
    """Calls to a run's services. Use it inside one event loop."""

    def __init__(self, run_id: str, attempt: int, trainer_address: str, scheduler_address: str) -> None:
        self._run_id = run_id
        self._attempt = attempt
        self._addresses = (trainer_address, scheduler_address)
        self._trainer_channel = open_aio_channel(trainer_address)
        self._scheduler_channel = open_aio_channel(scheduler_address)
        # The stubs' types know the asyncio kind only as a class of its own.
        self._trainer = cast("TrainerServiceAsyncStub", TrainerServiceStub(self._trainer_channel))
        self._scheduler = cast("SchedulerServiceAsyncStub", SchedulerServiceStub(self._scheduler_channel))
        self._registered: set[str] = set()
        self._last_trainer: TrainerServiceGetStatusResponse | None = None

    async def observe(self) -> Observation:
        """Asks both, at once. A service that does not answer yet, or any more, is no error."""
        trainer, fleet = await asyncio.gather(self._trainer_status(), self._fleet())
        self._last_trainer = trainer or self._last_trainer
        return Observation(self._last_trainer, fleet, trainer_answers=trainer is not None)

    async def report_death(self, instance: str) -> bool:
        """Tells the scheduler that a generator's process has ended, so that its samples go to others a lease earlier.

        Returns:
            Whether the generator had ever registered, as far as the scheduler or we remember.
        """
        fleet = await self._fleet(wait_for_ready=True)
        for known in fleet.instances if fleet is not None else ():
            if known.instance == instance and known.state != InstanceState.INSTANCE_STATE_DEAD:
                request = DrainRequest(
                    run_id=self._run_id,
                    attempt=self._attempt,
                    instance=instance,
                    incarnation=known.incarnation,
                    reason="its process has ended",
                    stopped=True,
                )
                try:
                    with peer_errors(f"scheduler at {self._addresses[1]}"):
                        await self._scheduler.Drain(request, timeout=_DEADLINE_S, wait_for_ready=True)
                except StreamRLError as error:
                    logger.warning("the death of %s shows only when its lease expires: %s", instance, error)
        return instance in self._registered

    async def ask_to_stop(self) -> bool:
        """Asks the trainer to end the run at the end of its iteration.

        Returns:
            Whether it answered.
        """
        try:
            with peer_errors(f"trainer at {self._addresses[0]}"):
                await self._trainer.Stop(TrainerServiceStopRequest(), timeout=_DEADLINE_S, wait_for_ready=True)
        except StreamRLError:
            return False
        return True

    async def _trainer_status(self) -> TrainerServiceGetStatusResponse | None:
        try:
            with peer_errors(f"trainer at {self._addresses[0]}"):
                status: TrainerServiceGetStatusResponse = await self._trainer.GetStatus(
                    TrainerServiceGetStatusRequest(), timeout=_DEADLINE_S
                )
        except StreamRLError:
            return None
        # Another run's trainer may have taken the port of one that is gone.
        return status if status.run_id == self._run_id else None

    async def _fleet(self, *, wait_for_ready: bool = False) -> GetFleetResponse | None:
        """None: no answer. A channel that failed a moment ago fails again at once, unless told to wait."""
        try:
            with peer_errors(f"scheduler at {self._addresses[1]}"):
                fleet: GetFleetResponse = await self._scheduler.GetFleet(
                    GetFleetRequest(run_id=self._run_id), timeout=_DEADLINE_S, wait_for_ready=wait_for_ready
                )
        except StreamRLError:
            return None
        self._registered.update(instance.instance for instance in fleet.instances)
        return fleet

    async def __aenter__(self) -> "Observer":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(self._trainer_channel.close(None), self._scheduler_channel.close(None))
