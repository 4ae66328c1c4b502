"""Why a service ended, in words: from its exit code, the error file it left, and its log."""

import re
import shutil
import signal
from pathlib import Path

from streamrl.run_folder import RunFolder

_READ_BYTES = 256 * 1024
_TAIL_LINES = 3
_MAX_LENGTH = 500
_LEAST_FREE_BYTES = 64 * 1024
# The last line of a traceback, bare or behind the prefix of an engine: "(Worker pid=7) ERROR … [x.py:3] ".
_RAISED = re.compile(r"^(?:\(.*\] )?((?:\w+\.)*\w*(?:Error|Exception): \S.*)$")


def death_reason(folder: RunFolder, instance: str, exit_code: int, log_start: int) -> str:
    """One sentence or two.

    An error that a process of the service met first is often the cause of the one that the service ended with.

    Args:
        exit_code: minus the number of the signal that killed it, where one did.
        log_start: length of its log when this life of it began.
    """
    error = folder.read_error(instance)
    if error is not None and error["kind"] == "bad_input":
        return error["message"]
    lines = _log_lines(folder.log(instance), log_start) if exit_code > 0 else []
    raised = _first_raised(lines)
    if error is not None:
        cause = f"; the first error in its log: {raised}" if raised and raised not in error["message"] else ""
        return error["message"] + cause
    words = raised or " / ".join(lines[-_TAIL_LINES:])
    if exit_code > 0 and shutil.disk_usage(folder.path).free < _LEAST_FREE_BYTES:
        # Its error file and its log had no place either.
        words = f"the disk of run folder {folder.path} is full. Free space, then streamrl resume {folder.path}"
    return describe_exit(exit_code) + (f": {words[:_MAX_LENGTH]}" if words else "")


def describe_exit(exit_code: int) -> str:
    """An exit code in words."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by signal {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


def _first_raised(lines: list[str]) -> str:
    """The first exception that ended a traceback; empty when there is none."""
    for line in lines:
        if (match := _RAISED.match(line)) is not None:
            return match.group(1)[:_MAX_LENGTH]
    return ""


def _log_lines(log: Path, start: int) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(start)
            data = file.read(_READ_BYTES)
    except FileNotFoundError:
        return []
    return [line.strip() for line in data.decode(errors="replace").splitlines() if line.strip()]
