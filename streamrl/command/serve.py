"""`streamrl serve`: one service in the foreground, for clusters, where something else starts, watches and restarts it.

All services of a run are given the same CONFIG: the addresses in it must be real ones, since nobody can hand on a port
that one of them has found free. With `--site` a service takes broker and peers of that site (sites.py).

Which attempt of the run it is, CONFIG does not say. Each start of the trainer is the next one, counted in its run
folder. The others begin as the first; one that is refused because the run has gone on is started over as a part of the
attempt that it met.
"""

import os
import signal
import subprocess
import threading
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from streamrl import lifetime
from streamrl.command.attempts import begin_next_attempt, last_summary
from streamrl.command.report import EXIT_COMPLETED, write_error
from streamrl.command.resolve import resolve
from streamrl.command.settings import Settings
from streamrl.command.sites import at_site
from streamrl.command.supervisor import service_command
from streamrl.run_folder import RunFolder, unusable_as_bad_input, write_private
from streamrl.storage import told_as_storage_error

_MUST_FIND = {
    "trainer": ("scheduler_address", "weights_address"),
    "generator": ("scheduler_address", "weights_address"),
    "scheduler": ("scheduler_address", "weights_address"),
    "weights": ("weights_address",),
}
"""What each service must be able to find: nobody calls the trainer or a generator to do the work."""
_ANY_HOST = ("0.0.0.0", "[::]")
_START_OVER_S = 1.0
"""Before a service is started over: the peer that it met may not have been started over itself."""


def serve(arguments: Namespace) -> int:
    """Runs the service until it ends.

    Returns:
        Its exit code.

    Raises:
        ValueError: the settings leave open what only `streamrl run` could decide, or the service does not stand at
            the site.
    """
    service = arguments.service
    settings = resolve(arguments.config, arguments.set, must_have_id=True)
    if arguments.site is not None:
        settings = at_site(settings, arguments.site, service)
    check_final(service, settings)
    # A relay may stand on the machine, and on the run folder, of its origin.
    is_relay = service == "weights" and settings.weights.upstream is not None
    instance = arguments.instance or (f"weights-{settings.run.site or 'relay'}" if is_relay else service)
    if service == "generator" and arguments.instance is None:
        raise ValueError("give this generator a name of its own in the run: --instance generator-0")
    folder = RunFolder(settings.run.folder)
    with unusable_as_bad_input(folder.path):
        (folder.path / "services").mkdir(parents=True, exist_ok=True)
    with told_as_storage_error(folder.path):
        if service == "trainer":
            return _serve_trainer(settings, folder, instance)
        return _serve_follower(service, settings, folder, instance)


def check_final(service: str, settings: Settings) -> None:
    """Raises ValueError when services that were started apart could not find each other."""
    problems = []
    if not settings.kafka.bootstrap_servers:
        hint = f", or give --site ({', '.join(settings.sites)})" if settings.sites and not settings.run.site else ""
        problems.append(f"kafka.bootstrap_servers is empty: the embedded broker comes only with `streamrl run`{hint}")
    for name in _MUST_FIND[service]:
        address = getattr(settings.rpc, name)
        if address.endswith(":0"):
            problems.append(f"rpc.{name} is {address}: give it a port that the other services can know")
        elif name != f"{service}_address" and _host(address) in _ANY_HOST:
            problems.append(
                f"rpc.{name} is {address}, where a service may listen but not be found: give its own address, in "
                "section rpc or in that of the site"
            )
    upstream = settings.weights.upstream
    if service == "weights" and upstream is not None and (upstream.endswith(":0") or _host(upstream) in _ANY_HOST):
        place = f"sites.{settings.run.site}.upstream"
        problems.append(f"the relay's upstream is {upstream}, where nobody is found: give it in {place}")
    if problems:
        raise ValueError("; ".join(problems))


def _host(address: str) -> str:
    return address.rpartition(":")[0]


def _serve_trainer(settings: Settings, folder: RunFolder, instance: str) -> int:
    """The trainer, whose rank 0 alone decides that there is a next attempt. Its run folder is the run's own."""
    if not speaks_for_all(os.environ):
        # What rank 0 has completed, nobody else begins again.
        return (
            EXIT_COMPLETED
            if _is_completed(settings, folder)
            else _serve_follower("trainer", settings, folder, instance)
        )
    with folder.lock():
        if _is_completed(settings, folder):
            return EXIT_COMPLETED
        settings = begin_next_attempt(folder, settings)
        _announce(settings, instance, folder.settings)
        exit_code = _Foreground().run(service_command("trainer", instance, folder.settings))
        # One that died when its work was done shall not be started again for it.
        return EXIT_COMPLETED if folder.is_completed() else exit_code


def speaks_for_all(environment: Mapping[str, str]) -> bool:
    """Whether a trainer that is started here is rank 0: a launcher tells each process by RANK, where it starts all of
    them, or by NODE_RANK, where it starts one on each machine."""
    return environment.get("RANK", environment.get("NODE_RANK", "0")) == "0"


def _is_completed(settings: Settings, folder: RunFolder) -> bool:
    summary = last_summary(folder) or {}
    done = summary.get("iterations")
    if summary.get("status") != "completed" or not isinstance(done, int) or done < settings.trainer.num_iterations:
        return False
    write_error(f"run {settings.run.id} is completed: it has done its {done} iterations")
    return True


def _serve_follower(service: str, settings: Settings, folder: RunFolder, instance: str) -> int:
    """Any other process, started over as long as it is told of a newer attempt."""
    file = folder.path / "services" / f"{instance}.settings.json"
    foreground = _Foreground()
    while True:
        write_private(file, settings.model_dump_json(indent=2))
        folder.error_file(instance).unlink(missing_ok=True)
        _announce(settings, instance, file)
        exit_code = foreground.run(service_command(service, instance, file))
        attempt = folder.read_newer_attempt(instance)
        if foreground.stop_asked.is_set() or attempt < settings.run.attempt or attempt == 0:
            return exit_code
        settings = settings.model_copy(update={"run": settings.run.model_copy(update={"attempt": attempt})})
        if foreground.stop_asked.wait(_START_OVER_S):
            return exit_code


def _announce(settings: Settings, instance: str, settings_file: Path) -> None:
    place = f" at site {settings.run.site}" if settings.run.site else ""
    write_error(f"{instance} of run {settings.run.id}{place}, attempt {settings.run.attempt}: {settings_file}")


class _Foreground:
    """Runs one process after another as if each were this one: signals go to it, its exit code comes back."""

    def __init__(self) -> None:
        """Call it in the main thread."""
        self.stop_asked = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._forward)

    def run(self, command: tuple[str, ...]) -> int:
        """Returns the exit code, as a shell would give it."""
        self._process = lifetime.spawn(command, with_signal=signal.SIGTERM)
        if self.stop_asked.is_set():
            # Asked while it was started.
            self._process.terminate()
        exit_code = self._process.wait()
        return exit_code if exit_code >= 0 else 128 - exit_code

    def _forward(self, _number: int, _frame: object) -> None:
        self.stop_asked.set()
        if self._process is not None:
            self._process.terminate()
