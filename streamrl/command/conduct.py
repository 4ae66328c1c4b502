"""One run from its first process to its last: starts, watches, stops and ends its processes.

It decides nothing about learning: the trainer says when the run is over.
"""

import asyncio
import logging
import os
from dataclasses import dataclass
from typing import Any

from streamrl.command.accelerators import gpu_shares, visible_gpus
from streamrl.command.broker import EmbeddedBroker
from streamrl.command.child_process import ChildProcess
from streamrl.command.display import Display
from streamrl.command.observer import Observation, Observer
from streamrl.command.report import error_report, now_text
from streamrl.command.settings import Settings
from streamrl.command.stop_signals import StopSignals, ignore_stop_signals
from streamrl.command.supervisor import Supervisor, service_launches
from streamrl.errors import StreamRLError
from streamrl.run_folder import RunFolder, RunRecord, RunStatus, ServiceRecord
from streamrl.v1.trainer_pb2 import TrainerServiceGetStatusResponse

logger = logging.getLogger(__name__)

_OBSERVE_EVERY_S = 1.0
_BEFORE_ITERATIONS = ("starting", "evaluating")
"""States of a trainer that stand before its first iteration, too."""
_GRACE_S = 10.0
"""For generators, when the run is over: nothing of theirs is needed any more."""
_FAILED_START_GRACE_S = 3.0
_FAILED_GRACE_S = 8.0
"""For the trainer, when another service has failed, to end what it can end alone, such as the writing of a checkpoint.
Rollouts that it waits for do not come any more."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    status: RunStatus
    summary: dict[str, Any] | None
    """What the trainer wrote; None when it did not get to it."""
    iterations: int = 0
    """How many it was seen to have ended."""
    error: BaseException | None = None


async def conduct(
    settings: Settings,
    folder: RunFolder,
    record: RunRecord,
    display: Display,
    broker: EmbeddedBroker | None,
    signals: StopSignals,
) -> Outcome:
    """Starts a run's services and returns when all have ended. Failures are in the outcome.

    Args:
        record: as it stands in the folder; replaced there whenever a process starts or ends.
        broker: the embedded broker, already running; ended with the run. None: the run uses a cluster.
    """
    return await _Conductor(settings, folder, record, display, broker, signals).conduct()


class _Conductor:
    """Runs one run. Use it once, from the main thread."""

    def __init__(
        self,
        settings: Settings,
        folder: RunFolder,
        record: RunRecord,
        display: Display,
        broker: EmbeddedBroker | None,
        signals: StopSignals,
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._record = record
        self._display = display
        self._broker = broker
        self._signals = signals
        self._stop_asked = asyncio.Event()
        self._abort_asked = asyncio.Event()
        self._observation = Observation(None, None)

    async def conduct(self) -> Outcome:
        run, rpc = self._settings.run, self._settings.rpc
        async with Observer(run.id, run.attempt, rpc.trainer_address, rpc.scheduler_address) as observer:
            supervisor = Supervisor(
                self._folder,
                service_launches(
                    self._folder.settings,
                    self._settings.generator.num_instances,
                    gpu_shares(self._settings, visible_gpus(os.environ)),
                ),
                max_restarts=run.max_restarts,
                on_generator_death=observer.report_death,
                on_change=lambda sentence: self._note(supervisor, sentence),
            )
            broker = ChildProcess(self._broker.process) if self._broker is not None else None
            error: BaseException | None = None
            self._signals.hand_to(self._on_signal)
            try:
                await self._until_over(supervisor, observer, broker)
            except (ValueError, StreamRLError) as caught:
                logger.error("the run failed: %s", caught)
                error = caught
            finally:
                # Everything is ended now anyway, within seconds: a signal makes it at once.
                self._signals.hand_to(self._abort_asked.set)
                await self._end(supervisor, broker, failed=error is not None)
                ignore_stop_signals()
        return self._outcome(error)

    async def _until_over(self, supervisor: Supervisor, observer: Observer, broker: ChildProcess | None) -> None:
        services = asyncio.create_task(supervisor.run(), name="services")
        helpers = [
            asyncio.create_task(self._observe(observer), name="observe"),
            asyncio.create_task(self._stop_when_asked(supervisor, observer), name="stop"),
        ]
        watched = [services, asyncio.create_task(self._abort_asked.wait(), name="abort"), *helpers]
        if broker is not None:
            watched.append(supervisor.watch_broker(broker))
        try:
            while not services.done() and not self._abort_asked.is_set():
                done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    watched.remove(task)
                    task.result()
        finally:
            if self._abort_asked.is_set():
                supervisor.kill()
            for task in watched:
                task.cancel()
            await asyncio.gather(*watched, return_exceptions=True)

    async def _observe(self, observer: Observer) -> None:
        """Shows what the run does, once a second."""
        while True:
            self._observation = await observer.observe()
            self._display.update(self._observation)
            await asyncio.sleep(_OBSERVE_EVERY_S)

    async def _stop_when_asked(self, supervisor: Supervisor, observer: Observer) -> None:
        await self._stop_asked.wait()
        # Asked first: what the last look says may be a second old.
        status = (await observer.observe()).trainer
        if await observer.ask_to_stop():
            self._display.step(f"stopping: the trainer {how_it_stops(status)}")
        else:
            self._display.step("stopping: the trainer has not begun")
            supervisor.terminate("trainer")

    def _on_signal(self) -> None:
        """The first signal asks for a stop in order, the second ends everything at once."""
        if self._stop_asked.is_set():
            self._display.step("stopping at once")
            self._abort_asked.set()
        else:
            self._display.step("asked to stop; once more stops at once")
            self._stop_asked.set()

    async def _end(self, supervisor: Supervisor, broker: ChildProcess | None, *, failed: bool) -> None:
        begun_grace_s = _FAILED_GRACE_S if self._iterations > 0 else _FAILED_START_GRACE_S
        grace_s = begun_grace_s if failed else _GRACE_S
        ending = asyncio.create_task(supervisor.end(grace_s))
        abort = asyncio.create_task(self._abort_asked.wait())
        await asyncio.wait([ending, abort], return_when=asyncio.FIRST_COMPLETED)
        if not ending.done():
            supervisor.kill()
            await ending
        abort.cancel()
        if broker is not None:
            await broker.end(_FAILED_START_GRACE_S)

    def _outcome(self, error: BaseException | None) -> Outcome:
        summary: dict[str, Any] | None = None
        try:
            summary = self._folder.read_summary()
        except ValueError as damaged:
            error = error or StreamRLError(str(damaged))
        status: RunStatus
        if error is not None:
            status = "failed"
        elif summary is not None and summary.get("status") in ("completed", "stopped"):
            status = summary["status"]
        elif self._stop_asked.is_set():
            status = "stopped"
        else:
            status = "failed"
            error = StreamRLError(
                f"the trainer ended without a summary: see {self._folder.log('trainer')}"
                if summary is None
                else f"the trainer says that the run {summary.get('status')}: see {self._folder.log('trainer')}"
            )
        if summary is not None and status == "failed" != summary.get("status"):
            # A trainer that was ended because another service had died says "stopped": it cannot know why.
            summary = {**summary, "status": status}
            self._folder.write_summary(summary)
        report = None if error is None else error_report(error)
        self._folder.write_record(self._record.ended(status, now_text(), report))
        return Outcome(status, summary, self._iterations, error)

    @property
    def _iterations(self) -> int:
        return self._observation.trainer.iteration if self._observation.trainer is not None else 0

    def _note(self, supervisor: Supervisor, sentence: str) -> None:
        """Says that a process started or ended, and writes down which run."""
        self._display.step(sentence)
        rpc = self._settings.rpc
        addresses = {"trainer": rpc.trainer_address, "scheduler": rpc.scheduler_address, "weights": rpc.weights_address}
        services = [
            ServiceRecord(
                service=running.service,
                instance=running.instance,
                process=running.process,
                address=addresses.get(running.service, ""),
                restarts=running.restarts,
            )
            for running in supervisor.running
        ]
        self._record = self._record.model_copy(update={"services": (*self._broker_record(), *services)})
        self._folder.write_record(self._record)

    def _broker_record(self) -> list[ServiceRecord]:
        return [record for record in self._record.services if record.service == "broker"]


def how_it_stops(status: TrainerServiceGetStatusResponse | None) -> str:
    """What a trainer does that was asked to stop."""
    if status is None or (status.iteration == 0 and status.state in _BEFORE_ITERATIONS):
        return "ends as soon as it can: its first iteration has not begun"
    return "ends at the end of its iteration, with a checkpoint"
