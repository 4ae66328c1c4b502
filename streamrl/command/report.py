"""How a command tells its result: one line of JSON on standard output with `--json`, sentences on standard error."""

import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

EXIT_COMPLETED = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


def error_report(error: BaseException) -> dict[str, str]:
    """kind and message of a failure, as the services write them too."""
    kind = "bad_input" if isinstance(error, ValueError) else type(error).__name__
    return {"kind": kind, "message": str(error) or type(error).__name__}


def exit_code_of(error: BaseException) -> int:
    """2 for what the user got wrong, 1 for what the system met."""
    return EXIT_BAD_INPUT if isinstance(error, ValueError) else EXIT_FAILED


def tell_failure(error: BaseException, *, as_json: bool, run_id: str | None = None) -> int:
    """Says why a command failed.

    Returns:
        The exit code.
    """
    report = error_report(error)
    write_error(f"error: {report['message']}")
    if as_json:
        run = {} if run_id is None else {"run_id": run_id}
        write_json({"status": "failed", **run, "error": report})
    return exit_code_of(error)


def write_json(result: Mapping[str, Any]) -> None:
    """The one line of `--json`."""
    write_line(json.dumps(result, ensure_ascii=False))


def write_line(text: str) -> None:
    """A result, on standard output."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def write_error(text: str) -> None:
    """A sentence for people, on standard error."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def now_text() -> str:
    """The time, ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")
