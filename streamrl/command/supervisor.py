"""Keeps the services of one attempt of a run alive until the trainer has ended, and ends them all.

What to do when one ends is decided in restart_policy.py. The broker, which outlives attempts, is broker_keeper.py's.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from streamrl import lifetime
from streamrl.command.child_process import ChildProcess
from streamrl.command.death_reason import death_reason, describe_exit
from streamrl.command.observer import Observer
from streamrl.command.restart_policy import EXIT_BAD_INPUT, Death, Deaths, NextAttempt, decide
from streamrl.errors import ServiceDiedError
from streamrl.lifetime import ProcessIdentity
from streamrl.run_folder import RunFolder

logger = logging.getLogger(__name__)

_LAST_STAGE_GRACE_S = 5.0


@dataclass(frozen=True)
class Launch:
    """A process to start."""

    service: str
    """trainer, generator, scheduler or weights."""
    instance: str
    """Its name in the run."""
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Over this process's own."""


@dataclass(frozen=True)
class RunningProcess:
    """A process that was started and has not ended."""

    service: str
    instance: str
    process: ProcessIdentity
    restarts: int


def service_launches(
    settings_file: Path, num_generators: int, environments: Mapping[str, Mapping[str, str]]
) -> list[Launch]:
    """All services of a run on one machine.

    Args:
        environments: by instance name; those without one inherit this process's.
    """
    names = [("weights", "weights"), ("scheduler", "scheduler"), ("trainer", "trainer")]
    names += [("generator", f"generator-{index}") for index in range(num_generators)]
    return [
        Launch(
            service,
            instance,
            service_command(service, instance, settings_file),
            environments.get(instance, {}),
        )
        for service, instance in names
    ]


def service_command(service: str, instance: str, settings_file: Path) -> tuple[str, ...]:
    """How a service is started."""
    return (sys.executable, "-m", f"{service}_svc", str(settings_file), "--instance", instance)


class Supervisor:
    """The services of one attempt. Use it from the main thread: children are signalled when their starting thread
    ends."""

    def __init__(
        self,
        folder: RunFolder,
        launches: Sequence[Launch],
        observer: Observer,
        deaths: Deaths,
        *,
        max_restarts: int,
        on_change: Callable[[str], None],
    ) -> None:
        """
        Args:
            observer: knows who was ready, and tells the scheduler of dead generators.
            deaths: of all attempts.
            on_change: called with a sentence whenever a process was started or has ended.
        """
        self._folder = folder
        self._launches = launches
        self._observer = observer
        self._deaths = deaths
        self._max_restarts = max_restarts
        self._on_change = on_change
        self._children: dict[str, ChildProcess] = {}
        self._stopping = False

    @property
    def running(self) -> list[RunningProcess]:
        """What runs now."""
        return [
            RunningProcess(launch.service, launch.instance, child.identity, self._deaths.count(launch.instance))
            for launch in self._launches
            if (child := self._children.get(launch.instance)) is not None and child.is_running
        ]

    async def run(self) -> NextAttempt | None:
        """Starts everything and returns when the trainer has ended: None, or why and when the run is to be taken up
        again.

        Raises:
            ValueError: a service refused its settings.
            ServiceDiedError: a service ended and is not coming back.
        """
        tasks = {asyncio.create_task(self._keep(launch), name=launch.instance): launch for launch in self._launches}
        try:
            while tasks:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    next_attempt = task.result()
                    if tasks.pop(task).service == "trainer":
                        return next_attempt
                if not self._stopping and all(launch.service != "generator" for launch in tasks.values()):
                    raise ServiceDiedError("every generator has been drained: nobody is left to answer the prompts")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return None

    def expect_ends(self) -> None:
        """From now on the end of a process surprises nobody."""
        self._stopping = True

    def runs(self, instance: str) -> bool:
        """Whether a process runs now."""
        child = self._children.get(instance)
        return child is not None and child.is_running

    async def ended(self, instance: str, timeout_s: float) -> bool:
        """Waits for the end of a process. False: it still runs after `timeout_s`."""
        if self.runs(instance):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._children[instance].wait(), timeout_s)
        return not self.runs(instance)

    def terminate(self, service: str) -> None:
        """Asks the processes of one service to end in order. An end that was asked for does not fail the run."""
        self._stopping = True
        for launch in self._launches:
            if launch.service == service and launch.instance in self._children:
                self._children[launch.instance].terminate()

    def kill(self) -> None:
        """Ends everything at once."""
        self._stopping = True
        for child in self._children.values():
            child.kill()

    async def end(self, grace_s: float) -> None:
        """Ends what still runs: first those that others serve, then those that serve.

        Args:
            grace_s: for trainer and generators, before they are killed.
        """
        self._stopping = True
        await asyncio.gather(self.end_all_of("trainer", grace_s), self.end_all_of("generator", grace_s))
        await asyncio.gather(
            self.end_all_of("scheduler", _LAST_STAGE_GRACE_S), self.end_all_of("weights", _LAST_STAGE_GRACE_S)
        )

    async def end_all_of(self, service: str, grace_s: float) -> None:
        """Ends the processes of one service in order, and kills what is left after `grace_s`."""
        children = [self._children.get(launch.instance) for launch in self._launches if launch.service == service]
        await asyncio.gather(*(child.end(grace_s) for child in children if child is not None))

    async def _keep(self, launch: Launch) -> NextAttempt | None:
        """Runs one service until it is done, or needs a new attempt."""
        instance = launch.instance
        while True:
            self._folder.error_file(instance).unlink(missing_ok=True)
            log_start = _size(self._folder.log(instance))
            child = self._start(launch)
            exit_code = await child.wait()
            logger.info("%s (pid %d) ended: %s", instance, child.identity.pid, describe_exit(exit_code))
            if self._stopping:
                return None
            ages_s = self._deaths.add(instance, time.monotonic())
            if launch.service == "generator":
                await self._observer.report_death(instance)
            error = self._folder.read_error(instance)
            death = Death(
                launch.service,
                exit_code,
                error_kind=error["kind"] if error is not None else "",
                was_ready=self._observer.was_ready(instance),
                run_is_completed=self._folder.is_completed(),
                in_vain=self._deaths.fails_in_vain(instance, exit_code, self._observer.iterations),
            )
            decision = decide(death, deaths_s=ages_s, max_restarts=self._max_restarts)
            if decision.action == "done":
                self._on_change(f"{instance} is done")
                return None
            reason = death_reason(self._folder, instance, exit_code, log_start)
            if decision.action == "fail":
                if exit_code == EXIT_BAD_INPUT and not death.was_ready:
                    raise ValueError(reason)
                raise ServiceDiedError(self._last_words(death, instance, reason, len(ages_s)))
            if decision.action == "next_attempt":
                return NextAttempt(f"{instance} died ({reason})", decision.delay_s)
            self._on_change(f"{instance} died ({reason}): starting it again in {decision.delay_s:g} s")
            await asyncio.sleep(decision.delay_s)

    def _start(self, launch: Launch) -> ChildProcess:
        process = lifetime.spawn(
            launch.command,
            log=self._folder.log(launch.instance),
            env={**os.environ, **launch.environment},
            with_signal=signal.SIGTERM,
        )
        child = ChildProcess(process)
        self._children[launch.instance] = child
        logger.info("%s started (pid %d)", launch.instance, process.pid)
        self._on_change(f"{launch.instance} started (pid {process.pid})")
        return child

    def _last_words(self, death: Death, instance: str, reason: str, num_deaths: int) -> str:
        if death.exit_code > 0 and not death.was_ready:
            how = f"{instance} could not start"
        elif num_deaths > self._max_restarts > 0:
            how = f"{instance} died {num_deaths} times within an hour (run.max_restarts is {self._max_restarts})"
        elif death.in_vain:
            how = f"{instance} failed twice after the same iteration"
        else:
            how = f"{instance} ended"
        return f"{how}: {reason} (log: {self._folder.log(instance)})"


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0
