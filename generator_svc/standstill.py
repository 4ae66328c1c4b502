"""When an instance generates nothing although it could: a pause, which is a lease, and the trainer's turn in colocated
mode.

Wishes come from the control service and from the scheduler; the generate loop makes the engine follow them, so that an
engine that dies over it is noticed there.
"""

import asyncio
import logging
from collections.abc import Callable

from generator_svc.engine import Engine
from streamrl.v1.scheduler_pb2 import FLEET_PHASE_GENERATE, FLEET_PHASE_TRAIN, FLEET_PHASE_UNSPECIFIED, FleetPhase

logger = logging.getLogger(__name__)


class Standstill:
    """What is wanted of the engine, and what it is like."""

    def __init__(self, engine: Engine, changed: Callable[[], None]) -> None:
        """
        Args:
            changed: called when a wish has changed; `follow` is to be called then.
        """
        self._engine = engine
        self._changed = changed
        self._pause_ends: asyncio.TimerHandle | None = None
        self._engine_paused = False
        self._wanted_phase: FleetPhase.ValueType = FLEET_PHASE_GENERATE
        self._followed = asyncio.Condition()
        self.phase: FleetPhase.ValueType = FLEET_PHASE_GENERATE
        """The phase that the engine is in."""

    @property
    def paused(self) -> bool:
        return self._pause_ends is not None

    @property
    def asleep(self) -> bool:
        return self.phase == FLEET_PHASE_TRAIN

    @property
    def nothing_may_begin(self) -> bool:
        return self.paused or self.asleep or self._wanted_phase == FLEET_PHASE_TRAIN

    async def pause(self, lease_s: float) -> None:
        """Wants a pause, for `lease_s` from now at most; returns when the engine draws nothing any more.

        Raises:
            ValueError: a lease must end, and later than now.
        """
        if not 0 < lease_s < float("inf"):
            raise ValueError(f"lease_s is {lease_s}: expected more than 0 seconds")
        self._end_timer()
        self._pause_ends = asyncio.get_running_loop().call_later(lease_s, self._lease_over)
        self._changed()
        async with self._followed:
            await self._followed.wait_for(lambda: self._engine_paused or not self.paused)

    def resume(self) -> None:
        """Wants the pause to end, if there is one."""
        self._end_timer()
        self._changed()

    def want_phase(self, phase: "FleetPhase.ValueType") -> None:
        """Unspecified, as of a scheduler in a new life that has not heard of the trainer yet, changes nothing."""
        if phase not in (FLEET_PHASE_UNSPECIFIED, self._wanted_phase):
            self._wanted_phase = phase
            self._changed()

    async def follow(self, nothing_runs: bool) -> bool:
        """Makes the engine what is wanted, as far as possible now.

        Args:
            nothing_runs: neither samples nor a switch: only then may the engine sleep.

        Returns:
            Whether the phase has changed.
        """
        if self.paused != self._engine_paused:
            await (self._engine.pause() if self.paused else self._engine.resume())
            self._engine_paused = not self._engine_paused
        phase_before = self.phase
        if self._wanted_phase == FLEET_PHASE_TRAIN and not self.asleep and nothing_runs:
            await self._engine.sleep()
            self.phase = FLEET_PHASE_TRAIN
        elif self._wanted_phase == FLEET_PHASE_GENERATE and self.asleep:
            await self._engine.wake()
            self.phase = FLEET_PHASE_GENERATE
        async with self._followed:
            self._followed.notify_all()
        return self.phase != phase_before

    def _lease_over(self) -> None:
        logger.warning("the pause's lease is over: generation goes on")
        self.resume()

    def _end_timer(self) -> None:
        if self._pause_ends is not None:
            self._pause_ends.cancel()
            self._pause_ends = None
