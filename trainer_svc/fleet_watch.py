"""Asks scheduler_svc and weights_svc how the fleet is, in a thread: figures must not cost training any time."""

import logging
import threading
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from streamrl.errors import StreamRLError
from streamrl.progress import fleet_mark
from streamrl.rpc.channel import open_channel
from streamrl.rpc.errors import peer_errors
from streamrl.v1.scheduler_pb2 import GetFleetRequest, GetFleetResponse
from streamrl.v1.scheduler_pb2_grpc import SchedulerServiceStub
from streamrl.v1.weights_pb2 import ListVersionsRequest, ListVersionsResponse
from streamrl.v1.weights_pb2_grpc import WeightsServiceStub
from trainer_svc.fleet_figures import BusyMeter, CutMeter, fleet_size_figures, length_figures, weight_figures

logger = logging.getLogger(__name__)

_INTERVAL_S = 2.0


class FleetWatch:
    """The newest state of fleet and weights, and figures over time."""

    def __init__(
        self, *, run_id: str, scheduler_address: str, weights_address: str, deadline_s: float, meter: BusyMeter
    ) -> None:
        self._run_id = run_id
        self._scheduler_address = scheduler_address
        self._weights_address = weights_address
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._fleet = GetFleetResponse()
        self._versions = ListVersionsResponse()
        self._meter = meter
        self._cut_meter = CutMeter()
        self._counting = False
        self._ask = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="fleet-watch", daemon=True)

    def start(self) -> "FleetWatch":
        self._thread.start()
        return self

    def close(self) -> None:
        self._ended = True
        self._ask.set()
        self._thread.join(2 * self._deadline_s)

    def count(self, counting: bool) -> None:
        """Whether the time from now on counts for the generators' idle share."""
        with self._lock:
            self._counting = counting
        self._ask.set()

    def figures(self) -> dict[str, float]:
        """The newest, and of what was cut that since the last call; nothing is asked."""
        with self._lock:
            return {
                "idle/generator": self._meter.idle_share,
                **fleet_size_figures(self._fleet),
                **self._cut_meter.figures(self._fleet),
                **length_figures(self._fleet),
                **weight_figures(self._versions),
            }

    @property
    def dead_letters(self) -> int:
        """Records that the scheduler or an instance could not handle."""
        with self._lock:
            return int(self._fleet.dead_letters)

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes that full fetches would have taken, and bytes sent."""
        with self._lock:
            return int(self._versions.bytes_full), int(self._versions.bytes_sent)

    @property
    def idle_share(self) -> float:
        with self._lock:
            return self._meter.idle_share

    @property
    def busy_and_available_s(self) -> tuple[float, float]:
        """Of all instances: seconds with work, out of these."""
        with self._lock:
            return self._meter.busy_s, self._meter.available_s

    def progress_mark(self) -> Hashable:
        """Changes when generation or a weight transfer moves."""
        with self._lock:
            return fleet_mark(self._fleet), self._versions.bytes_sent

    def waits(self) -> str:
        """Who waits for whom, as the scheduler says."""
        with self._lock:
            return "; ".join(self._fleet.waits)

    def refresh(self) -> None:
        """Asks now, in the caller's thread. Best effort."""
        with self._stubs() as (scheduler, weights):
            self._poll(scheduler, weights)

    def _run(self) -> None:
        with self._stubs() as (scheduler, weights):
            while not self._ended:
                self._poll(scheduler, weights)
                self._ask.wait(_INTERVAL_S)
                self._ask.clear()

    @contextmanager
    def _stubs(self) -> Iterator[tuple[SchedulerServiceStub, WeightsServiceStub]]:
        with open_channel(self._scheduler_address) as scheduler, open_channel(self._weights_address) as weights:
            yield SchedulerServiceStub(scheduler), WeightsServiceStub(weights)

    def _poll(self, scheduler: SchedulerServiceStub, weights: WeightsServiceStub) -> None:
        # Whether they answer matters to the reporter and the publisher, which say so; here old figures do.
        try:
            with peer_errors(f"scheduler_svc at {self._scheduler_address}"):
                fleet = scheduler.GetFleet(GetFleetRequest(run_id=self._run_id), timeout=self._deadline_s)
            with self._lock:
                self._fleet = fleet
                self._meter.add(fleet, time.monotonic(), counted=self._counting)
            with peer_errors(f"weights_svc at {self._weights_address}"):
                versions = weights.ListVersions(ListVersionsRequest(run_id=self._run_id), timeout=self._deadline_s)
        except StreamRLError as error:
            logger.debug("no figures of the fleet: %s", error)
            return
        with self._lock:
            self._versions = versions
