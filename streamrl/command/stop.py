"""`streamrl stop`: asks the process that runs a run to end it, and waits until it has."""

import os
import signal
import time
from argparse import Namespace

from streamrl import lifetime
from streamrl.command.report import EXIT_COMPLETED, EXIT_FAILED, write_error, write_json
from streamrl.command.runs import named_run
from streamrl.run_folder import RunFolder, RunRecord

_TELL_EVERY_S = 10.0


def stop(arguments: Namespace) -> int:
    """Runs the command. Raises ValueError when there is no such run.

    Returns:
        0 when the run is over, whether we ended it or it had ended before; 1 when it failed while it ended.
    """
    folder = named_run(arguments.run)
    record = folder.read_record()
    state: str = record.state
    if state == "running":
        state = _end(folder, record, now=arguments.now)
        sentence = f"run {record.run_id} has ended: {state}"
    else:
        sentence = f"run {record.run_id} was over already: {state}"
        left = _end_orphans(record) if state == "dead" else []
        if left:
            sentence += f"; ended what was left of it: {', '.join(left)}"
    write_error(sentence)
    if arguments.json:
        write_json({"run_id": record.run_id, "state": state, "message": sentence})
    return EXIT_FAILED if state == "failed" and record.state == "running" else EXIT_COMPLETED


def _end(folder: RunFolder, record: RunRecord, *, now: bool) -> str:
    """Signals the run's process and waits for its end."""
    try:
        pidfd = os.pidfd_open(record.process.pid)
    except ProcessLookupError:
        return folder.read_record().state
    try:
        if record.process.send(signal.SIGTERM):
            if now:
                # The second signal means at once. It must not arrive together with the first: they would be one.
                lifetime.wait_ended(pidfd, timeout_s=0.5)
                record.process.send(signal.SIGTERM)
            else:
                write_error(
                    f"run {record.run_id} ends at the end of its iteration, or as soon as it can while it starts; "
                    "`streamrl stop --now` ends it at once"
                )
            started_s = time.monotonic()
            while not lifetime.wait_ended(pidfd, timeout_s=_TELL_EVERY_S):
                write_error(f"still waiting for run {record.run_id} ({time.monotonic() - started_s:.0f} s)")
    finally:
        os.close(pidfd)
    return folder.read_record().state


def _end_orphans(record: RunRecord) -> list[str]:
    """Kills what outlived its run. Each process sees to its own end within seconds, so mostly there is nothing."""
    return [service.instance for service in record.services if service.process.send(signal.SIGKILL)]
