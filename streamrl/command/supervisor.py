"""Keeps the processes of a run alive until the trainer is done, and ends them all.

What to do when one ends is decided in restart_policy.py.
"""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from streamrl import lifetime
from streamrl.command.child_process import ChildProcess
from streamrl.command.death_reason import death_reason, describe_exit
from streamrl.command.restart_policy import EXIT_BAD_INPUT, WINDOW_S, decide
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
    """The processes of one run. Use it from the main thread: children are signalled when their starting thread ends."""

    def __init__(
        self,
        folder: RunFolder,
        launches: Sequence[Launch],
        *,
        max_restarts: int,
        on_generator_death: Callable[[str], Awaitable[bool]],
        on_change: Callable[[str], None],
    ) -> None:
        """
        Args:
            on_generator_death: called with the instance's name; answers whether it had ever registered.
            on_change: called with a sentence whenever a process was started or has ended.
        """
        self._folder = folder
        self._launches = launches
        self._max_restarts = max_restarts
        self._on_generator_death = on_generator_death
        self._on_change = on_change
        self._children: dict[str, ChildProcess] = {}
        self._restarts: dict[str, int] = {}
        self._stopping = False

    @property
    def running(self) -> list[RunningProcess]:
        """What runs now."""
        return [
            RunningProcess(launch.service, launch.instance, child.identity, self._restarts.get(launch.instance, 0))
            for launch in self._launches
            if (child := self._children.get(launch.instance)) is not None and child.is_running
        ]

    async def run(self) -> None:
        """Starts everything and returns when the trainer has ended as it should.

        Raises:
            ValueError: a service refused its settings.
            ServiceDiedError: a service ended and is not coming back.
        """
        tasks = {asyncio.create_task(self._keep(launch), name=launch.instance): launch for launch in self._launches}
        try:
            while tasks:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                    if tasks.pop(task).service == "trainer":
                        return
                if not self._stopping and all(launch.service != "generator" for launch in tasks.values()):
                    raise ServiceDiedError("every generator has been drained: nobody is left to answer the prompts")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def watch_broker(self, broker: ChildProcess) -> "asyncio.Task[None]":
        """A task that fails when the embedded broker ends before it was asked to."""
        return asyncio.create_task(self._watch_broker(broker), name="broker")

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
        """Ends in order what still runs: first those that others serve, then those that serve.

        Args:
            grace_s: for trainer and generators, before they are killed.
        """
        self._stopping = True
        await self._end_services(("trainer", "generator"), grace_s)
        await self._end_services(("scheduler", "weights"), _LAST_STAGE_GRACE_S)

    async def _end_services(self, services: tuple[str, ...], grace_s: float) -> None:
        children = [self._children.get(launch.instance) for launch in self._launches if launch.service in services]
        await asyncio.gather(*(child.end(grace_s) for child in children if child is not None))

    async def _keep(self, launch: Launch) -> None:
        """Runs one service until it is done."""
        was_ready = False
        deaths: list[float] = []
        while True:
            self._folder.error_file(launch.instance).unlink(missing_ok=True)
            log_start = _size(self._folder.log(launch.instance))
            child = self._start(launch)
            exit_code = await child.wait()
            logger.info("%s (pid %d) ended: %s", launch.instance, child.identity.pid, describe_exit(exit_code))
            if self._stopping:
                return
            now = time.monotonic()
            deaths = [death for death in deaths if now - death <= WINDOW_S] + [now]
            if launch.service == "generator":
                was_ready |= await self._on_generator_death(launch.instance)
            decision = decide(
                launch.service,
                exit_code,
                was_ready=was_ready,
                deaths_s=[now - death for death in deaths],
                max_restarts=self._max_restarts,
            )
            if decision.action == "done":
                self._on_change(f"{launch.instance} is done")
                return
            reason = death_reason(self._folder, launch.instance, exit_code, log_start)
            if decision.action == "fail":
                if exit_code == EXIT_BAD_INPUT:
                    raise ValueError(reason)
                raise ServiceDiedError(self._last_words(launch, exit_code, reason, len(deaths), was_ready))
            self._restarts[launch.instance] = self._restarts.get(launch.instance, 0) + 1
            self._on_change(f"{launch.instance} died ({reason}): starting it again in {decision.delay_s:g} s")
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

    async def _watch_broker(self, broker: ChildProcess) -> None:
        exit_code = await broker.wait()
        if not self._stopping:
            raise ServiceDiedError(
                f"the embedded broker ended ({describe_exit(exit_code)}), and what it held is lost: see "
                f"{self._folder.log('broker')}. A Kafka cluster (kafka.bootstrap_servers) would keep it."
            )

    def _last_words(self, launch: Launch, exit_code: int, reason: str, num_deaths: int, was_ready: bool) -> str:
        log = self._folder.log(launch.instance)
        if launch.service != "generator":
            how = f"{launch.instance} ended"
        elif exit_code > 0 and not was_ready:
            how = f"{launch.instance} could not start"
        else:
            how = f"{launch.instance} died {num_deaths} times within an hour (run.max_restarts is {self._max_restarts})"
        return f"{how}: {reason} (log: {log})"


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0
