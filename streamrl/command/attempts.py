"""The next attempt of a run: what must be true, and what is written, before its processes start.

The number is raised on the disk first; then the settings that carry it are written. Nothing of an attempt runs before
both, so that no two lives of a run ever have one number. What the trainer does with the number (checkpoint, topics) is
its own affair: trainer_svc/resumption.py.
"""

import os
import time
from collections.abc import Callable, Sequence

from streamrl import lifetime
from streamrl.command.fixed_settings import check_changes
from streamrl.command.resolve import resolve_again, without_chosen
from streamrl.command.settings import Settings
from streamrl.run_folder import RunFolder, RunRecord, ServiceRecord, write_private
from streamrl.settings import RunSection


def begin_next_attempt(folder: RunFolder, settings: Settings) -> Settings:
    """Begins the next attempt of a run of which no process lives any more; start the services with what it returns.

    For `streamrl resume`, and for whoever takes a run up again inside one command.

    Args:
        settings: as the services shall have them (addresses final, the broker's too), but for the attempt.

    Returns:
        The same, of the new attempt; `folder.settings` holds them.

    Raises:
        ValueError: a setting differs that a run keeps for life, or the record of attempts is damaged.
    """
    if folder.settings.exists():
        before = last_settings(folder)
        check_changes(before, settings.model_copy(update={"run": _of_attempt(settings, before.run.attempt)}))
    attempt = folder.begin_attempt()
    # What an earlier attempt had to say of its end is not how this one ended.
    folder.summary.unlink(missing_ok=True)
    settings = settings.model_copy(update={"run": _of_attempt(settings, attempt)})
    write_private(folder.settings, settings.model_dump_json(indent=2))
    return settings


def last_settings(folder: RunFolder, chosen: Sequence[str] = ()) -> Settings:
    """The settings of a run's last attempt.

    Args:
        chosen: names of addresses that are left to the command again.

    Raises:
        ValueError: the file is missing or damaged.
    """
    values = folder.read_settings()
    # The runs may have been moved since; a renamed one would have other topics.
    values["run"] = {**values.get("run", {}), "dir": str(folder.path.parent)}
    try:
        return resolve_again(without_chosen(values, chosen), folder.settings.name, [])
    except ValueError as error:
        raise folder.damaged_settings(error) from error


def _of_attempt(settings: Settings, attempt: int) -> RunSection:
    return settings.run.model_copy(update={"attempt": attempt})


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
