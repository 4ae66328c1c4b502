"""The next attempt of a run: what must be true, and what is written, before its processes start.

The number is raised on the disk first; then the settings that carry it are written. Nothing of an attempt runs before
both, so that no two lives of a run ever have one number. What the trainer does with the number (checkpoint, topics) is
its own affair: trainer_svc/resumption.py.
"""

import os
import time
from collections.abc import Callable

from streamrl import lifetime
from streamrl.command.settings import Settings
from streamrl.run_folder import RunFolder, RunRecord, ServiceRecord, write_private


def begin_next_attempt(folder: RunFolder, settings: Settings) -> Settings:
    """Begins the next attempt of a run of which no process lives any more; start the services with what it returns.

    For `streamrl resume`, and for whoever takes a run up again inside one command.

    Args:
        settings: as the services shall have them (addresses final, the broker's too), but for the attempt.

    Returns:
        The same, of the new attempt; `folder.settings` holds them.

    Raises:
        ValueError: the record of attempts is damaged.
    """
    attempt = folder.begin_attempt()
    # What an earlier attempt had to say of its end is not how this one ended.
    folder.summary.unlink(missing_ok=True)
    settings = settings.model_copy(update={"run": settings.run.model_copy(update={"attempt": attempt})})
    write_private(folder.settings, settings.model_dump_json(indent=2))
    return settings


def wait_for_earlier_processes(record: RunRecord, timeout_s: float, say: Callable[[str], None]) -> None:
    """Waits for what a killed command has left behind: its processes notice, and end within seconds.

    Raises:
        ValueError: some still live after `timeout_s`.
    """
    left = living(record)
    if left:
        say(f"waiting for the end of {', '.join(one.instance for one in left)} of the attempt before")
    deadline = time.monotonic() + timeout_s
    for one in left:
        try:
            pidfd = os.pidfd_open(one.process.pid)
        except ProcessLookupError:
            continue
        try:
            if one.process.is_alive():
                lifetime.wait_ended(pidfd, max(0.0, deadline - time.monotonic()))
        finally:
            os.close(pidfd)
    if left := living(record):
        names = ", ".join(f"{one.instance} (pid {one.process.pid})" for one in left)
        raise ValueError(
            f"processes of run {record.run_id} still live: {names}. End them first (streamrl stop {record.run_id})"
        )


def living(record: RunRecord) -> list[ServiceRecord]:
    """The processes of a run's services that live, its command apart."""
    return [service for service in record.services if service.process.is_alive()]
