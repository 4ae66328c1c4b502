"""Moves the fleet between generating and giving up the machine (colocated mode)."""

import logging
import time

from streamrl.errors import UnavailableError
from streamrl.rpc.channel import open_channel
from streamrl.rpc.errors import peer_errors
from streamrl.v1.scheduler_pb2 import FLEET_PHASE_GENERATE, FleetPhase, SetPhaseRequest
from streamrl.v1.scheduler_pb2_grpc import SchedulerServiceStub

logger = logging.getLogger(__name__)

_RETRY_S = 0.5


class FleetPhases:
    """The trainer's side of `SetPhase`."""

    def __init__(self, address: str, *, run_id: str, attempt: int, patience_s: float) -> None:
        """
        Args:
            patience_s: how long all instances may take to get there, the scheduler's absences included.
        """
        self._address = address
        self._run_id = run_id
        self._attempt = attempt
        self._patience_s = patience_s
        self.wanted: FleetPhase.ValueType = FLEET_PHASE_GENERATE
        """What was asked for last."""

    def set(self, phase: FleetPhase.ValueType) -> None:
        """Returns when all live instances are in the phase. Repeating is harmless.

        Raises:
            UnavailableError: they are not within `patience_s`.
            RefusedError: the scheduler says no.
        """
        # Noted first: a scheduler that is in a new life meanwhile is told by the next report.
        self.wanted = phase
        request = SetPhaseRequest(run_id=self._run_id, attempt=self._attempt, phase=phase)
        deadline_s = time.monotonic() + self._patience_s
        with open_channel(self._address) as channel:
            stub = SchedulerServiceStub(channel)
            while True:
                try:
                    with peer_errors(f"scheduler_svc at {self._address}"):
                        stub.SetPhase(request, timeout=max(_RETRY_S, deadline_s - time.monotonic()))
                    logger.debug("the fleet is in %s", FleetPhase.Name(phase))
                    return
                except UnavailableError:
                    if time.monotonic() + _RETRY_S > deadline_s:
                        raise
                    time.sleep(_RETRY_S)
