"""What a run does now, asked of its services; and what they are told: to stop, and who died."""

import asyncio
import logging
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, cast

from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from streamrl.errors import StreamRLError
from streamrl.rpc.channel import open_aio_channel
from streamrl.rpc.errors import peer_errors
from streamrl.rpc.trust import use_identity
from streamrl.settings import RpcSection
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
    """What services said about a run."""

    trainer: TrainerServiceGetStatusResponse | None
    """Its last answer; None before the first."""
    fleet: GetFleetResponse | None
    """None: the scheduler does not answer."""
    trainer_answers: bool = True
    """Whether the trainer's last answer is one to the last question."""
    weights_answers: bool = True
    registered_pids: frozenset[int] = frozenset()
    """Processes of the instances that the scheduler knows, or knew when it last answered."""


class Observer:
    """Calls to a run's services. Use it inside one event loop."""

    def __init__(self, run_id: str, rpc: RpcSection) -> None:
        self._run_id = run_id
        self._attempt = 0
        self._rpc = rpc
        use_identity(rpc.trust, "command")
        self._trainer_channel = open_aio_channel(rpc.trainer_address)
        self._scheduler_channel = open_aio_channel(rpc.scheduler_address)
        self._weights_channel = open_aio_channel(rpc.weights_address)
        # The stubs' types know the asyncio kind only as a class of its own.
        self._trainer = cast("TrainerServiceAsyncStub", TrainerServiceStub(self._trainer_channel))
        self._scheduler = cast("SchedulerServiceAsyncStub", SchedulerServiceStub(self._scheduler_channel))
        self._weights_health = HealthStub(self._weights_channel)
        self._ready: set[str] = set()
        self._registered_pids: frozenset[int] = frozenset()
        self._last_trainer: TrainerServiceGetStatusResponse | None = None

    def begin_attempt(self, attempt: int) -> None:
        """The run is in this attempt: what the processes of an earlier one have said is over."""
        self._attempt = attempt
        self._last_trainer = None
        self._registered_pids = frozenset()

    def was_ready(self, instance: str) -> bool:
        """Whether a service, or an instance, was ever seen to have started, in this attempt or an earlier one."""
        return instance in self._ready

    @property
    def iterations(self) -> int:
        """How many the trainer of this attempt was seen to have ended, those before the attempt included."""
        return int(self._last_trainer.iteration) if self._last_trainer is not None else 0

    async def observe(self) -> Observation:
        """Asks all, at once. A service that does not answer yet, or any more, is no error."""
        trainer, fleet, weights_answers = await asyncio.gather(
            self._trainer_status(), self._fleet(), self._weights_answers()
        )
        self._last_trainer = trainer or self._last_trainer
        return Observation(
            self._last_trainer,
            fleet,
            trainer_answers=trainer is not None,
            weights_answers=weights_answers,
            registered_pids=self._registered_pids,
        )

    async def report_death(self, instance: str) -> None:
        """Tells the scheduler that a generator's process has ended: its samples go to others a lease earlier."""
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
                    with peer_errors(f"scheduler at {self._rpc.scheduler_address}"):
                        await self._scheduler.Drain(request, timeout=_DEADLINE_S, wait_for_ready=True)
                except StreamRLError as error:
                    logger.warning("the death of %s shows only when its lease expires: %s", instance, error)

    async def ask_to_stop(self, *, at_once: bool = False) -> bool:
        """Asks the trainer to end the run at the end of its iteration, with a checkpoint.

        Args:
            at_once: it gives the iteration up too.

        Returns:
            Whether it answered.
        """
        try:
            with peer_errors(f"trainer at {self._rpc.trainer_address}"):
                request = TrainerServiceStopRequest(at_once=at_once)
                await self._trainer.Stop(request, timeout=_DEADLINE_S, wait_for_ready=True)
        except StreamRLError:
            return False
        return True

    async def _trainer_status(self) -> TrainerServiceGetStatusResponse | None:
        try:
            with peer_errors(f"trainer at {self._rpc.trainer_address}"):
                status: TrainerServiceGetStatusResponse = await self._trainer.GetStatus(
                    TrainerServiceGetStatusRequest(), timeout=_DEADLINE_S
                )
        except StreamRLError:
            return None
        # Another run's trainer may have taken the port of one that is gone.
        if status.run_id != self._run_id:
            return None
        if status.state != "starting":
            self._ready.add("trainer")
        return status

    async def _weights_answers(self) -> bool:
        try:
            with peer_errors(f"weights at {self._rpc.weights_address}"):
                answer = await self._weights_health.Check(HealthCheckRequest(), timeout=_DEADLINE_S)
        except StreamRLError:
            return False
        if answer.status != HealthCheckResponse.SERVING:
            return False
        self._ready.add("weights")
        return True

    async def _fleet(self, *, wait_for_ready: bool = False) -> GetFleetResponse | None:
        """None: no answer. A channel that failed a moment ago fails again at once, unless told to wait."""
        try:
            with peer_errors(f"scheduler at {self._rpc.scheduler_address}"):
                fleet: GetFleetResponse = await self._scheduler.GetFleet(
                    GetFleetRequest(run_id=self._run_id), timeout=_DEADLINE_S, wait_for_ready=wait_for_ready
                )
        except StreamRLError:
            return None
        self._ready.update(["scheduler", *(instance.instance for instance in fleet.instances)])
        self._registered_pids = frozenset(instance.pid for instance in fleet.instances)
        return fleet

    async def __aenter__(self) -> "Observer":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        channels = (self._trainer_channel, self._scheduler_channel, self._weights_channel)
        await asyncio.gather(*(channel.close(None) for channel in channels))
