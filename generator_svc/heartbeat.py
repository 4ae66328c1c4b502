"""The heartbeat stream with the scheduler, which is the instance's lease.

Requests go up at every interval, which each answer may change, and at once when there is something to say; answers come
down at any time. A stream that breaks is opened again, also with a scheduler in another life, while the lease lasts.
"""

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Protocol

import grpc

from generator_svc.patience import FIRST_PAUSE_S
from streamrl.errors import UnavailableError
from streamrl.rpc.errors import peer_errors
from streamrl.v1.scheduler_pb2 import HeartbeatRequest, HeartbeatResponse, RegisterResponse

if TYPE_CHECKING:
    from streamrl.v1.scheduler_pb2_grpc import SchedulerServiceAsyncStub

    _Stream = grpc.aio.StreamStreamCall[HeartbeatRequest, HeartbeatResponse]

logger = logging.getLogger(__name__)


class Speaker(Protocol):
    """Who speaks through a heartbeat."""

    def report(self) -> HeartbeatRequest:
        """The next request; what it says is taken as said."""

    def heard(self, response: HeartbeatResponse) -> None:
        """An answer that grants the lease."""

    def not_heard(self) -> None:
        """A stream broke: what it carried since the last answer may be lost."""


class Heartbeat:
    """Keeps one lease after another."""

    def __init__(self, stub: "SchedulerServiceAsyncStub", peer: str) -> None:
        """
        Args:
            peer: the scheduler and its address, for messages.
        """
        self._stub = stub
        self._peer = peer
        self._something_to_say = False
        self._look_up = asyncio.Event()
        """There is something to say, or the interval has changed."""
        self._answered = asyncio.Event()
        self._interval_s = 0.0
        self._lease_s = 0.0
        self._last_answer = float("-inf")
        self.event_loop_lag_s = 0.0
        """Delay of the last wake-up."""

    def say_now(self) -> None:
        """Does not wait for the interval to end."""
        self._something_to_say = True
        self._look_up.set()

    async def answered(self, timeout_s: float) -> bool:
        """Speaks now, and waits for the next answer; False: none came."""
        self._answered.clear()
        self.say_now()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._answered.wait()
        return self._answered.is_set()

    def holds(self) -> bool:
        """Whether the lease lasts, by the clock: also right after a process that was stopped goes on."""
        return self._since_answer_s() <= self._lease_s

    async def keep(self, place: RegisterResponse, speaker: Speaker) -> None:
        """Returns when the lease is lost: not granted any more, or nothing heard for `lease_s`.

        Raises:
            RefusedError: the scheduler wants nothing of this process.
        """
        self._lease_s, self._last_answer = place.lease_s, time.monotonic()
        self._interval_s = place.heartbeat_interval_s
        beat = asyncio.create_task(self._beat(speaker))
        try:
            while self.holds() and not beat.done():
                await asyncio.wait({beat}, timeout=max(self._lease_s - self._since_answer_s(), 0.0))
            if beat.done():
                await beat
            else:
                logger.warning("incarnation %d is over: nothing heard for %.1f s", place.incarnation, self._lease_s)
        finally:
            beat.cancel()
            await asyncio.gather(beat, return_exceptions=True)
            self._lease_s = 0.0

    async def _beat(self, speaker: Speaker) -> None:
        """Returns when the scheduler does not grant the lease."""
        granted = True
        while granted:
            try:
                granted = await self._exchange(speaker)
            except UnavailableError as error:
                logger.info("the heartbeat stream is opened again: %s", error)
            speaker.not_heard()
            if granted:
                await asyncio.sleep(FIRST_PAUSE_S)
        logger.warning("%s does not grant the lease any more", self._peer)

    async def _exchange(self, speaker: Speaker) -> bool:
        """One stream until it ends.

        Returns:
            Whether the lease was granted to the end.
        """
        call = self._stub.Heartbeat()  # type: ignore[call-arg]  # written to, not iterated over
        sending = asyncio.create_task(self._send(call, speaker))
        reading = asyncio.create_task(self._read(call, speaker))
        try:
            await asyncio.wait({sending, reading}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
            return await reading
        finally:
            sending.cancel()
            reading.cancel()
            call.cancel()
            await asyncio.gather(sending, reading, return_exceptions=True)

    async def _read(self, call: "_Stream", speaker: Speaker) -> bool:
        with peer_errors(self._peer):
            while isinstance(response := await call.read(), HeartbeatResponse):
                if not response.lease_granted or not self.holds():
                    return False
                self._last_answer = time.monotonic()
                self._lease_s = response.lease_s or self._lease_s
                if response.heartbeat_interval_s not in (0.0, self._interval_s):
                    self._interval_s = response.heartbeat_interval_s
                    self._look_up.set()
                self._answered.set()
                speaker.heard(response)
        return True

    async def _send(self, call: "_Stream", speaker: Speaker) -> None:
        # A stream that is over is reported to whoever reads it.
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            while True:
                self._something_to_say = False
                await call.write(speaker.report())
                await self._pause()

    async def _pause(self) -> None:
        """Until there is something to say, or the interval is over."""
        began = time.monotonic()
        while not self._something_to_say:
            self._look_up.clear()
            due = began + self._interval_s
            left_s = due - time.monotonic()
            if left_s <= 0:
                return
            try:
                async with asyncio.timeout(left_s):
                    await self._look_up.wait()
            except TimeoutError:
                self.event_loop_lag_s = max(time.monotonic() - due, 0.0)
                return

    def _since_answer_s(self) -> float:
        return time.monotonic() - self._last_answer
