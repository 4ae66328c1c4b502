"""Two runs that take turns on one machine, an iteration each.

How fast a shared machine is differs from one minute to the next by more than what is to be compared. Iterations that
follow each other within seconds have the same machine: the trainer of the run that has no turn is paused between two
iterations, and its engines wait. What goes on meanwhile, a new version on its way to the engines and a length ranker
that learns at the lowest priority, goes on in both.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, TypeVar

import grpc

from streamrl.rpc.channel import open_channel
from streamrl.run_folder import RunFolder
from streamrl.v1.trainer_pb2 import (
    TrainerServiceGetStatusRequest,
    TrainerServiceGetStatusResponse,
    TrainerServicePauseRequest,
    TrainerServiceResumeRequest,
)
from streamrl.v1.trainer_pb2_grpc import TrainerServiceStub

logger = logging.getLogger(__name__)

_LOOK_S = 0.05
_LEASE_S = 3600.0
"""Of a pause: longer than all turns."""
_CALL_S = 5.0

Answer = TypeVar("Answer")
Run = Callable[[], Mapping[str, Any]]
"""Does a run and returns its summary."""


def in_turns(runs: Sequence[tuple[RunFolder, Run]]) -> list[Mapping[str, Any]]:
    """Does all runs, and returns their summaries. Who begins a round of turns changes from round to round.

    Args:
        runs: each with the folder that it will have; in mode sync, so that nothing of an iteration goes on after it.

    Raises:
        what a run raises; the others go on to their end.
    """
    with ThreadPoolExecutor(len(runs)) as threads, ExitStack() as channels:
        trainers = [_Trainer(folder, threads.submit(run), channels) for folder, run in runs]
        for trainer in trainers:
            trainer.pause()
        first = 0
        while any(not trainer.is_over for trainer in trainers):
            for trainer in trainers[first:] + trainers[:first]:
                trainer.take_turn()
            first = (first + 1) % len(trainers)
        return [trainer.summary() for trainer in trainers]


class _Trainer:
    """That of a run that goes on in another thread."""

    def __init__(self, folder: RunFolder, run: "Future[Mapping[str, Any]]", channels: ExitStack) -> None:
        """
        Args:
            channels: closes its own in the end.
        """
        self._folder = folder
        self._run = run
        self._channels = channels
        self._stub: TrainerServiceStub | None = None

    @property
    def is_over(self) -> bool:
        return self._run.done()

    def summary(self) -> Mapping[str, Any]:
        return self._run.result()

    def pause(self) -> None:
        """Waits until it is ready for its first turn."""
        while not self.is_over and self._stub is None:
            time.sleep(_LOOK_S)
            if address := self._published_address():
                self._stub = TrainerServiceStub(self._channels.enter_context(open_channel(address)))
        while not self.is_over and self._status() is None:
            time.sleep(_LOOK_S)
        self._ask_for_pause()
        self._wait(lambda status: status.state == "paused")

    def take_turn(self) -> None:
        """One iteration, and the rest of the run if it was the last."""
        if (before := self._status()) is None:
            self._wait(lambda _: False)
            return
        self._call(lambda stub: stub.Resume(TrainerServiceResumeRequest(), timeout=_CALL_S))
        # A pause that is asked for before the trainer has seen the end of the last one would be the same pause.
        self._wait(lambda status: status.state != "paused" or status.iteration > before.iteration)
        self._ask_for_pause()
        self._wait(lambda status: status.state == "paused" and status.iteration > before.iteration)

    def _published_address(self) -> str:
        try:
            services = self._folder.read_record().services
        except ValueError:  # the folder is not there yet
            return ""
        return next((service.address or "" for service in services if service.service == "trainer"), "")

    def _ask_for_pause(self) -> None:
        self._call(lambda stub: stub.Pause(TrainerServicePauseRequest(lease_s=_LEASE_S), timeout=_CALL_S))

    def _wait(self, seen: Callable[[TrainerServiceGetStatusResponse], bool]) -> None:
        """Until its status is one that is waited for, or the run is over."""
        while not self.is_over:
            status = self._status()
            if status is not None and seen(status):
                return
            time.sleep(_LOOK_S)

    def _status(self) -> TrainerServiceGetStatusResponse | None:
        return self._call(lambda stub: stub.GetStatus(TrainerServiceGetStatusRequest(), timeout=_CALL_S))

    def _call(self, call: Callable[[TrainerServiceStub], Answer]) -> Answer | None:
        """None: it does not answer, for it starts or is over."""
        if self._stub is None:
            return None
        try:
            return call(self._stub)
        except grpc.RpcError:
            return None
