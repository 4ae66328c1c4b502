"""An instance's place in the fleet: it registers, keeps its lease, and begins another life when that is lost."""

import logging
from typing import TYPE_CHECKING, cast

from generator_svc.activity import ActivityLog
from generator_svc.assignment_reader import AssignmentReader
from generator_svc.engine import Engine
from generator_svc.generate_loop import GenerateLoop
from generator_svc.heartbeat import Heartbeat
from generator_svc.outbox import Outbox
from generator_svc.patience import patiently
from generator_svc.weight_switch import WeightSwitch
from streamrl.batch_progress import progress_proto
from streamrl.errors import StreamRLError
from streamrl.identity import SampleKey
from streamrl.rpc.channel import open_aio_channel
from streamrl.rpc.errors import peer_errors
from streamrl.settings import RpcSection
from streamrl.v1.scheduler_pb2 import (
    DrainRequest,
    HeartbeatRequest,
    HeartbeatResponse,
    RegisterRequest,
    RegisterResponse,
    StepLatency,
)
from streamrl.v1.scheduler_pb2_grpc import SchedulerServiceStub

if TYPE_CHECKING:
    from streamrl.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

logger = logging.getLogger(__name__)


class SchedulerConnection:
    """The channel to the scheduler, and the heartbeat on it."""

    def __init__(self, rpc: RpcSection) -> None:
        self.rpc = rpc
        self.peer = f"scheduler_svc at {rpc.scheduler_address}"
        self._channel = open_aio_channel(rpc.scheduler_address)
        self.stub = cast("SchedulerServiceAsyncStub", SchedulerServiceStub(self._channel))
        self.heartbeat = Heartbeat(self.stub, self.peer)

    async def close(self) -> None:
        await self._channel.close(None)


class Membership:
    """One incarnation after another. It is the `Speaker` of the heartbeat."""

    def __init__(
        self,
        scheduler: SchedulerConnection,
        who: RegisterRequest,
        *,
        engine: Engine,
        weights: WeightSwitch,
        loop: GenerateLoop,
        reader: AssignmentReader,
        outbox: Outbox,
        activity: ActivityLog,
    ) -> None:
        self._scheduler = scheduler
        self._who = who
        self._engine = engine
        self._weights = weights
        self._loop = loop
        self._reader = reader
        self._outbox = outbox
        self._activity = activity
        self._busy_before_s = 0.0
        self.incarnation = 0
        """0 before the first."""

    async def run(self) -> None:
        """Goes on until the instance drains and has lost its lease, or until it is cancelled.

        Raises:
            UnavailableError: the scheduler did not answer for `rpc.patience_s`.
            RefusedError: it does not want this instance.
        """
        while not self._loop.draining:
            place = await self._register()
            self.incarnation = place.incarnation
            self._busy_before_s = self._activity.busy_s
            self._loop.begin(place.incarnation)
            # Its records cannot be handled before the lease below begins: nothing in between gives way to them.
            self._reader.begin(place.incarnation, place.partition)
            try:
                await self._scheduler.heartbeat.keep(place, self)
                await self._loop.abandon()
            finally:
                await self._reader.end()

    async def leave(self, reason: str, deadline_s: float) -> None:
        """Tells the scheduler, if it listens, that nothing runs here any more."""
        if not self.incarnation:
            return
        request = DrainRequest(
            run_id=self._who.run_id,
            attempt=self._who.attempt,
            instance=self._who.instance,
            incarnation=self.incarnation,
            reason=reason,
            stopped=True,
        )
        try:
            with peer_errors(self._scheduler.peer):
                await self._scheduler.stub.Drain(request, timeout=deadline_s)
        except StreamRLError as error:
            logger.info("left without a word: %s", error)

    def report(self) -> HeartbeatRequest:
        request = HeartbeatRequest(
            run_id=self._who.run_id,
            attempt=self._who.attempt,
            instance=self._who.instance,
            incarnation=self.incarnation,
            running=self._loop.num_running,
            waiting=self._loop.num_waiting,
            weight_version=self._weights.loaded,
            busy_s=self._activity.busy_s - self._busy_before_s,
            generated_tokens=self._loop.generated_tokens,
            finished_samples=self._loop.finished_samples,
            event_loop_lag_s=self._scheduler.heartbeat.event_loop_lag_s,
            step_latencies=[StepLatency(**steps._asdict()) for steps in self._engine.step_latencies()],
            phase=self._loop.standstill.phase,
            draining=self._loop.draining,
            dead_letters=self._outbox.dead_letters,
            progress=progress_proto(self._loop.progress()),
        )
        if self._loop.answers.write_to(request):
            self._scheduler.heartbeat.say_now()
        return request

    def heard(self, response: HeartbeatResponse) -> None:
        self._loop.answers.heard()
        if response.revoke:
            self._loop.revoke([SampleKey.from_proto(sample_id) for sample_id in response.revoke])
        if response.revoke_unstarted:
            self._loop.revoke_unstarted([SampleKey.from_proto(sample_id) for sample_id in response.revoke_unstarted])
        if response.hand_over:
            self._loop.hand_over([SampleKey.from_proto(sample_id) for sample_id in response.hand_over])
        if response.HasField("newest_weight_version"):
            self._loop.announce(response.newest_weight_version)
        self._loop.standstill.want_phase(response.phase)

    def not_heard(self) -> None:
        self._loop.answers.not_heard()

    async def _register(self) -> RegisterResponse:
        rpc, peer = self._scheduler.rpc, self._scheduler.peer

        async def call() -> RegisterResponse:
            with peer_errors(peer):
                return await self._scheduler.stub.Register(self._who, timeout=rpc.deadline_s)

        place = await patiently(call, rpc.patience_s)
        logger.info("registered as incarnation %d, partition %d", place.incarnation, place.partition)
        return place
