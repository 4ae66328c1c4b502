"""What every service's main.py does around its own work: arguments, settings, logs, exit codes."""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NoReturn

from pydantic import ValidationError

from streamrl import lifetime
from streamrl.errors import StaleAttemptError, StreamRLError
from streamrl.logs import set_up_logs
from streamrl.rpc.trust import use_identity
from streamrl.settings import SettingsT, load
from streamrl.storage import storage_error

logger = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
TERMINATION_GRACE_S = 60.0
"""A service that was asked to end and has not is ended hard after this."""

EXIT_LIMIT_S = 30
"""For an interpreter that is taken down when its service has ended."""


@dataclass(frozen=True)
class Service(Generic[SettingsT]):
    """A service as `main` runs it.

    `serve` does the work until `stop` is set (an asyncio.Event) and returns; `check` looks at what the settings name
    on this machine (files, functions) and raises ValueError, before anything starts.
    """

    name: str
    settings_class: type[SettingsT]
    serve: Callable[[SettingsT, str, asyncio.Event], Coroutine[Any, Any, None]]
    check: Callable[[SettingsT], None] = lambda _settings: None


def main(service: Service[SettingsT], argv: list[str] | None = None) -> int:
    """Runs a service: `python -m X_svc SETTINGS.json [--instance NAME] [--check]`.

    Returns:
        The exit code: 0 done, 1 failed, 2 bad input. A failure is also written to `services/NAME.error.json` in the
        run folder, for whoever started the service.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {service.name}", description=f"Runs {service.name}.")
    parser.add_argument("settings", type=Path, help="resolved settings (settings.json of a run folder)")
    parser.add_argument(
        "--instance", default=service.name, help="name of this process in the run (default: %(default)s)"
    )
    parser.add_argument("--check", action="store_true", help="only check what the settings name on this machine")
    arguments = parser.parse_args(argv)
    error_file: Path | None = None
    try:
        settings = load(service.settings_class, arguments.settings)
        set_up_logs(arguments.instance, settings.run.log_level)
        error_file = settings.run.folder / "services" / f"{arguments.instance}.error.json"
        use_identity(settings.rpc.trust, service.name.removesuffix("_svc"))
        if arguments.check:
            service.check(settings)
        else:
            asyncio.run(_serve(service, settings, arguments.instance))
    except (ValueError, StreamRLError) as error:
        return _failed(error, error_file if not arguments.check else None)
    except Exception as error:  # the outermost edge: whoever started the service must learn why it ended
        if error_file is not None and (full := storage_error(error, settings.run.folder)) is not None:
            return _failed(full, error_file if not arguments.check else None)
        logger.exception("%s failed", service.name)
        return _failed(error, error_file if not arguments.check else None)
    return 0


def end_process(exit_code: int) -> NoReturn:
    """Ends a process that `main` was run in; for `__main__.py` alone.

    One that served ends as Python does, but within `EXIT_LIMIT_S`; one that only checked ends at once, whatever threads
    the modules have started that the settings name.
    """
    logging.shutdown()
    if "--check" in sys.argv[1:]:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    lifetime.bound_exit(EXIT_LIMIT_S)
    sys.exit(exit_code)


async def _serve(service: Service[SettingsT], settings: SettingsT, instance: str) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def ask_to_stop() -> None:
        loop.call_soon_threadsafe(stop.set)

    lifetime.on_termination(ask_to_stop, grace_s=TERMINATION_GRACE_S)
    await service.serve(settings, instance, stop)


def _failed(error: Exception, error_file: Path | None) -> int:
    bad_input = isinstance(error, ValueError)
    report: dict[str, Any] = {"kind": "bad_input" if bad_input else type(error).__name__, "message": explain(error)}
    if isinstance(error, StaleAttemptError):
        # Whoever started the service may start it over as a part of that attempt.
        report["current_attempt"] = error.current_attempt
    logger.error("%s", report["message"])
    if error_file is not None:
        with contextlib.suppress(OSError):  # a run folder that cannot be written may be the failure itself
            error_file.parent.mkdir(parents=True, exist_ok=True)
            error_file.write_text(json.dumps(report))
    print(json.dumps(report), file=sys.stderr)  # noqa: T201
    return EXIT_BAD_INPUT if bad_input else EXIT_FAILED


def explain(error: Exception) -> str:
    """An error's message for a person; pydantic's validation errors in one line each."""
    if not isinstance(error, ValidationError):
        return str(error) or type(error).__name__
    lines = []
    for problem in error.errors():
        place = ".".join(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        lines.append(f"{place}: {message}" if place else message)
    return "; ".join(lines)
