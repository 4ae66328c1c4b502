"""One run from its first process to its last: starts, watches, stops and ends its processes, in one attempt or several.

It decides nothing about learning: the trainer says when the run is over, and the checkpoint where the next attempt
begins. What becomes of a process that dies is decided in restart_policy.py.
"""

import asyncio
import contextlib
import logging
import os
import time
from dataclasses import dataclass
from typing import Any, Literal

from streamrl.command.accelerators import gpu_shares, visible_gpus
from streamrl.command.attempts import begin_next_attempt
from streamrl.command.broker import EmbeddedBroker
from streamrl.command.broker_keeper import BrokerKeeper
from streamrl.command.display import Display
from streamrl.command.observer import Observation, Observer
from streamrl.command.process_view import view_processes
from streamrl.command.report import error_report, now_text
from streamrl.command.restart_policy import Deaths, NextAttempt
from streamrl.command.settings import Settings
from streamrl.command.stop_signals import StopSignals, ignore_stop_signals
from streamrl.command.supervisor import Supervisor, service_launches
from streamrl.command.watchdog import Watchdog
from streamrl.errors import NoProgressError, StreamRLError
from streamrl.run_folder import RunFolder, RunRecord, RunStatus, ServiceRecord
from streamrl.storage import storage_error
from streamrl.v1.trainer_pb2 import TrainerServiceGetStatusResponse

logger = logging.getLogger(__name__)

Ending = Literal["over", "goes_on", "failed"]
"""What comes after an attempt: nothing, another one, or an error."""

_OBSERVE_EVERY_S = 1.0
_LOOK_EVERY_S = 0.5
_BEFORE_ITERATIONS = ("starting", "evaluating")
"""States of a trainer that stand before its first iteration, too."""
_GRACE_S = 10.0
"""For generators, when the run is over: nothing of theirs is needed any more."""
_BROKEN_GRACE_S = 3.0
"""For trainer and generators, when something that they need is gone."""
_GIVE_UP_S = 8.0
"""For the trainer, when something that it needs is gone, to give up its iteration and to begin with its checkpoint."""
_CHECKPOINT_S = 600.0
"""For a checkpoint that has begun."""


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
        settings: as they stand in the folder, of the attempt that begins.
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
        self._signals = signals
        self._stop_asked = asyncio.Event()
        self._abort_asked = asyncio.Event()
        self._observation = Observation(None, None)
        self._notes_shown: set[str] = set()
        self._deaths = Deaths()
        self._supervisor: Supervisor | None = None
        self._broker: BrokerKeeper | None = None
        if broker is not None:
            self._broker = BrokerKeeper(
                broker,
                folder.log("broker"),
                self._deaths,
                max_restarts=settings.run.max_restarts,
                on_change=self._tell_change,
            )

    async def conduct(self) -> Outcome:
        error: BaseException | None = None
        async with Observer(self._settings.run.id, self._settings.rpc) as observer:
            try:
                while (next_attempt := await self._attempt(observer)) is not None:
                    # What its trainer has completed is not begun again, whatever ended beside it.
                    if self._folder.is_completed() or not await self._pause_before(next_attempt):
                        break
                    self._settings = begin_next_attempt(self._folder, self._settings)
                    if self._broker is not None:
                        self._broker.replace()
            except (ValueError, StreamRLError) as caught:
                logger.error("the run failed: %s", caught)
                error = caught
            except OSError as caught:
                error = storage_error(caught, self._folder.path)
                if error is None:
                    raise
                logger.error("the run failed: %s", error)
            finally:
                # Everything is ended now anyway, within seconds: a signal makes it at once.
                self._signals.hand_to(self._abort_asked.set)
                if self._broker is not None:
                    await self._broker.end(_BROKEN_GRACE_S)
                ignore_stop_signals()
        return self._outcome(error)

    async def _attempt(self, observer: Observer) -> NextAttempt | None:
        """One attempt, until nothing of it runs any more.

        Returns:
            None when the run is over; else why there is to be another attempt.

        Raises:
            ValueError: a service refused its settings.
            StreamRLError: something ended that is not coming back, or nothing moved any more.
        """
        run = self._settings.run
        observer.begin_attempt(run.attempt)
        self._supervisor = supervisor = Supervisor(
            self._folder,
            service_launches(
                self._folder.settings,
                self._settings.generator.num_instances,
                gpu_shares(self._settings, visible_gpus(os.environ)),
            ),
            observer,
            self._deaths,
            max_restarts=run.max_restarts,
            on_change=self._tell_change,
        )
        ending: Ending = "failed"
        self._signals.hand_to(self._on_signal)
        try:
            next_attempt = await self._until_over(supervisor, observer)
            ending = "over" if next_attempt is None else "goes_on"
            return next_attempt
        finally:
            self._signals.hand_to(self._abort_asked.set)
            await self._end(supervisor, observer, ending)

    async def _until_over(self, supervisor: Supervisor, observer: Observer) -> NextAttempt | None:
        """Returns when the trainer is done, the run is to be aborted (None), or a next attempt is needed."""
        services = asyncio.create_task(supervisor.run(), name="services")
        watched: list[asyncio.Task[Any]] = [
            services,
            asyncio.create_task(self._abort_asked.wait(), name="abort"),
            asyncio.create_task(self._observe(observer), name="observe"),
            asyncio.create_task(self._stop_when_asked(supervisor, observer), name="stop"),
        ]
        broker = asyncio.create_task(self._broker.keep(), name="broker") if self._broker is not None else None
        if broker is not None:
            watched.append(broker)
        try:
            while not self._abort_asked.is_set():
                done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    watched.remove(task)
                    task.result()
                if broker is not None and broker in done:
                    return broker.result()
                if services in done:
                    return services.result()
            supervisor.kill()
            return None
        finally:
            for task in watched:
                task.cancel()
            await asyncio.gather(*watched, return_exceptions=True)

    async def _observe(self, observer: Observer) -> None:
        """Shows what the run does, once a second, and ends the wait when it does nothing any more.

        Raises:
            NoProgressError: nothing has moved for `run.no_progress_s`.
        """
        watchdog = Watchdog(self._settings.run.no_progress_s, time.monotonic())
        while True:
            self._observation = await observer.observe()
            self._display.update(self._observation)
            self._show_notes(self._observation.trainer)
            now_s = time.monotonic()
            processes = view_processes(self._record.services) if watchdog.wants_processes(now_s) else ()
            if (sentence := watchdog.look(self._observation, processes, now_s)) is not None:
                raise NoProgressError(sentence)
            await asyncio.sleep(_OBSERVE_EVERY_S)

    def _show_notes(self, status: TrainerServiceGetStatusResponse | None) -> None:
        """What the trainer wants read, once each."""
        for note in status.notes if status is not None else ():
            if note not in self._notes_shown:
                self._notes_shown.add(note)
                self._display.step(note)

    async def _stop_when_asked(self, supervisor: Supervisor, observer: Observer) -> None:
        await self._stop_asked.wait()
        # Asked first: what the last look says may be a second old.
        status = (await observer.observe()).trainer
        if await observer.ask_to_stop():
            self._display.step(f"stopping: the trainer {how_it_stops(status)}")
            return
        began = observer.was_ready("trainer")
        self._display.step(
            f"stopping: the trainer {'does not answer, and' if began else 'has not begun, and'} is told by a signal"
        )
        supervisor.terminate("trainer")

    def _on_signal(self) -> None:
        """The first signal asks for a stop in order, the second ends everything at once."""
        if self._stop_asked.is_set():
            self._display.step("stopping at once")
            self._abort_asked.set()
        else:
            self._display.step("asked to stop; once more stops at once")
            self._stop_asked.set()

    async def _pause_before(self, next_attempt: NextAttempt) -> bool:
        """Waits as long as the next attempt is to wait. False: the run was asked to stop."""
        # Before anybody is told: whoever reads it may answer with a signal at once.
        self._signals.hand_to(self._on_signal)
        if self._is_to_end:
            return False
        self._display.step(
            f"{next_attempt.reason}: the run is taken up again from its "
            f"{'newest checkpoint' if self._folder.has_checkpoint() else 'beginning'} in {next_attempt.delay_s:g} s"
        )
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop_asked.wait(), next_attempt.delay_s)
        return not self._is_to_end

    @property
    def _is_to_end(self) -> bool:
        """Whether a signal has asked for it."""
        return self._stop_asked.is_set() or self._abort_asked.is_set()

    async def _end(self, supervisor: Supervisor, observer: Observer, ending: Ending) -> None:
        """Ends the services of an attempt in order, or at once when that is asked for."""
        in_order = asyncio.create_task(self._end_in_order(supervisor, observer, ending))
        abort = asyncio.create_task(self._abort_asked.wait())
        await asyncio.wait([in_order, abort], return_when=asyncio.FIRST_COMPLETED)
        if not in_order.done():
            supervisor.kill()
            await in_order
        abort.cancel()

    async def _end_in_order(self, supervisor: Supervisor, observer: Observer, ending: Ending) -> None:
        supervisor.expect_ends()
        if ending == "over":
            await supervisor.end(_GRACE_S)
            return
        await asyncio.gather(
            self._let_trainer_save(supervisor, observer, ending), supervisor.end_all_of("generator", _BROKEN_GRACE_S)
        )
        await supervisor.end(_BROKEN_GRACE_S)

    async def _let_trainer_save(self, supervisor: Supervisor, observer: Observer, ending: Ending) -> None:
        """Has the trainer give up its iteration, whose rollouts do not come any more, and write a checkpoint of those
        before, if there are any. When the run goes on, its log need not be closed."""
        if not supervisor.runs("trainer") or observer.iterations == 0:
            return
        if not await observer.ask_to_stop(at_once=True):
            return
        begun_s = time.monotonic()
        while supervisor.runs("trainer"):
            status = (await observer.observe()).trainer
            state = status.state if status is not None else ""
            if state == "done" and ending == "goes_on":
                return
            if time.monotonic() - begun_s > (_CHECKPOINT_S if state == "checkpointing" else _GIVE_UP_S):
                return
            await supervisor.ended("trainer", _LOOK_EVERY_S)

    def _outcome(self, error: BaseException | None) -> Outcome:
        summary: dict[str, Any] | None = None
        try:
            summary = self._folder.read_summary()
        except ValueError as damaged:
            error = error or StreamRLError(str(damaged))
        if error is not None and self._folder.is_completed():
            logger.warning("the run was completed before: %s", error)
            error = None
        status: RunStatus
        if error is not None:
            status = "failed"
        elif summary is not None and summary.get("status") in ("completed", "stopped"):
            status = summary["status"]
        elif self._is_to_end:
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
        report = None if error is None else error_report(error)
        try:
            self._folder.write_end(self._record.ended(status, now_text(), report))
            if status == "failed" and summary is not None:
                self._folder.write_summary(summary)
        except OSError as caught:
            # How it ended is told all the same; a run whose record says that it runs can be taken up again, too.
            logger.error("how the run ended could not be written: %s", caught)
            error = error or storage_error(caught, self._folder.path) or StreamRLError(str(caught))
        return Outcome(status, summary, self._iterations, error)

    @property
    def _iterations(self) -> int:
        return self._observation.trainer.iteration if self._observation.trainer is not None else 0

    def _tell_change(self, sentence: str) -> None:
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
            for running in (self._supervisor.running if self._supervisor is not None else ())
        ]
        broker = [self._broker.record] if self._broker is not None else []
        self._record = self._record.model_copy(update={"services": (*broker, *services)})
        self._folder.write_record(self._record)


def how_it_stops(status: TrainerServiceGetStatusResponse | None) -> str:
    """What a trainer does that was asked to stop."""
    if status is None or (status.iteration == 0 and status.state in _BEFORE_ITERATIONS):
        return "ends as soon as it can: its first iteration has not begun"
    return "ends at the end of its iteration, with a checkpoint"
