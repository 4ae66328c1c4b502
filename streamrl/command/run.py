"""`streamrl run`: resolve the settings, look before starting, make the run's folder, run, tell how it ended.

What it shares with `streamrl resume` (resume.py) is `carry_out` and `tell`.
"""

import asyncio
import contextlib
import logging
import os
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from streamrl.command.broker import EmbeddedBroker, check_embedded
from streamrl.command.checks import (
    check_accelerators,
    check_addresses,
    check_broker,
    check_memory,
    check_services,
    check_trust,
    not_checked_offline,
)
from streamrl.command.conduct import Outcome, conduct
from streamrl.command.display import Display, open_display, show_summary
from streamrl.command.memory_needs import MemoryNeeds
from streamrl.command.report import (
    EXIT_COMPLETED,
    EXIT_INTERRUPTED,
    error_report,
    now_text,
    tell_failure,
    write_error,
    write_json,
    write_line,
)
from streamrl.command.resolve import chosen_settings, resolve, with_addresses
from streamrl.command.settings import Settings
from streamrl.command.settings_text import public_settings, toml_text
from streamrl.command.stop_signals import StopSignals
from streamrl.errors import StreamRLError
from streamrl.kafka.connection import Connection
from streamrl.kafka.topic_states import refuse_used_topics
from streamrl.lifetime import ProcessIdentity
from streamrl.run_folder import RunFolder, RunRecord, ServiceRecord
from streamrl.storage import told_as_storage_error

_WAITS_FOR_BATCHES = (
    "Gradients are computed when a batch's last sample is there (trainer.algorithm, trainer.steps_per_batch): until "
    "then its samples only pass the reference and the critic, if there are any."
)


def run(arguments: Namespace) -> int:
    """Runs the command.

    Returns:
        The exit code.

    Raises:
        ValueError: bad input, found before anything was started.
        StreamRLError: the broker does not answer.
    """
    settings = resolve(arguments.config, arguments.set)
    folder = RunFolder(settings.run.folder)
    folder.check_usable()
    if arguments.dry_run:
        return _dry_run(settings, as_json=arguments.json)
    if settings.sites:
        raise ValueError(
            f"the settings name sites ({', '.join(settings.sites)}), and this command runs everything on one machine: "
            "start each service where it belongs (streamrl serve SERVICE CONFIG --site NAME), or leave the sites out"
        )
    signals = StopSignals()
    uses_cluster = bool(settings.kafka.bootstrap_servers)
    with told_as_storage_error(folder.path), contextlib.ExitStack() as stack:
        display = stack.enter_context(contextlib.closing(open_display(settings.generator.num_instances)))

        def create(settings: Settings, record: RunRecord) -> Settings:
            if uses_cluster:
                refuse_used_topics(Connection(settings.kafka, "streamrl-run"), settings.run.id)
            folder.create(record, settings.model_dump_json(indent=2))
            stack.enter_context(folder.lock())
            return settings

        display.step(f"run {settings.run.id}: checking")
        outcome = carry_out(settings, folder, display, signals, str(arguments.config), create)
    return tell(outcome, settings, folder, as_json=arguments.json)


Begin = Callable[[Settings, RunRecord], Settings]
"""Makes the folder ready for an attempt with these settings and this record; returns the settings that it wrote."""


def carry_out(
    settings: Settings, folder: RunFolder, display: Display, signals: StopSignals, config: str, begin: Begin
) -> Outcome:
    """Looks before starting, fills in the addresses, starts the broker, begins, and runs to the end.

    Args:
        config: the settings file that the run was started with.

    Raises:
        ValueError: bad input, found before anything was written.
        StreamRLError: the broker does not answer.
    """
    asked = settings
    check_addresses(settings)
    check_trust(settings)
    check_accelerators(settings)
    check_memory(settings)
    with ThreadPoolExecutor(1) as waiter:
        # A broker that does not answer is waited for beside the services' checks, which need this thread.
        broker_check = waiter.submit(check_broker, settings)
        check_services(settings, display.step)
        broker_check.result()
    settings = with_addresses(settings)
    settings = settings.model_copy(update={"run": settings.run.model_copy(update={"watched": True})})
    with contextlib.ExitStack() as stack:
        broker: EmbeddedBroker | None = None
        if not settings.kafka.bootstrap_servers:
            broker = stack.enter_context(
                EmbeddedBroker.start(settings.kafka, data=folder.path / "kafka", log=folder.log("broker"))
            )
            settings = settings.model_copy(update={"kafka": broker.settings(settings.kafka)})
        record = _first_record(settings, config, broker, chosen_settings(asked, settings))
        settings = begin(settings, record)
        _log_to(folder.log("run"), settings.run.log_level)
        if broker is not None:
            try:
                broker.wait_ready()
            except StreamRLError as error:
                folder.write_end(record.ended("failed", now_text(), error_report(error)))
                raise
            display.step(f"broker ready at {broker.address}")
        return asyncio.run(conduct(settings, folder, record, display, broker, signals))


def _first_record(settings: Settings, config: str, broker: EmbeddedBroker | None, chosen: tuple[str, ...]) -> RunRecord:
    me = ProcessIdentity.of(os.getpid())
    assert me is not None
    services: tuple[ServiceRecord, ...] = ()
    if broker is not None and (process := ProcessIdentity.of(broker.process.pid)) is not None:
        services = (ServiceRecord(service="broker", instance="broker", process=process, address=broker.address),)
    return RunRecord(
        run_id=settings.run.id, config=config, process=me, started_at=now_text(), services=services, chosen=chosen
    )


def _log_to(log: Path, level: str) -> None:
    """What this process logs goes into the run's folder: standard error shows progress."""
    # On a full disk lines are lost without a word: whoever cannot go on without the disk tells of it, once.
    logging.raiseExceptions = False
    handler = logging.FileHandler(log)
    handler.setFormatter(logging.Formatter("%(asctime)s run %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)


def tell(outcome: Outcome, settings: Settings, folder: RunFolder, *, as_json: bool) -> int:
    """Says how a run ended.

    Returns:
        The exit code.
    """
    if outcome.error is not None:
        return tell_failure(outcome.error, as_json=as_json, run_id=settings.run.id)
    if outcome.summary is not None:
        if as_json:
            write_json(outcome.summary)
        show_summary(outcome.summary)
        write_error(f"everything of this run is in {folder.path}")
    else:
        message = "stopped before the trainer had begun"
        if outcome.iterations > 0:
            plural = "" if outcome.iterations == 1 else "s"
            message = f"ended at once, without a checkpoint, after {outcome.iterations} iteration{plural}"
        write_error(message)
        if as_json:
            error = {"kind": "interrupted", "message": message}
            write_json({"status": outcome.status, "run_id": settings.run.id, "error": error})
    return EXIT_COMPLETED if outcome.status == "completed" else EXIT_INTERRUPTED


def _memory_json(needs: MemoryNeeds) -> dict[str, Any]:
    return {"total": needs.total, "trainer": needs.trainer, "generators": needs.generators, "rank": asdict(needs.rank)}


def _dry_run(settings: Settings, *, as_json: bool) -> int:
    """Checks what can be checked without broker, hub, network or accelerator, and shows the resolved settings."""
    check_trust(settings)
    needs = check_memory(settings)
    if not settings.kafka.bootstrap_servers:
        check_embedded(settings.kafka)
    check_services(settings, write_error)
    notes = [_WAITS_FOR_BATCHES] if settings.trainer.waits_for_batches else []
    if as_json:
        write_json(
            {
                "status": "checked",
                "run_id": settings.run.id,
                "settings": public_settings(settings),
                "memory_bytes": _memory_json(needs) if needs is not None else None,
                "notes": notes,
                "not_checked": not_checked_offline(settings),
            }
        )
        return EXIT_COMPLETED
    write_line(toml_text(public_settings(settings)))
    if needs is not None:
        write_error(f"Memory: about {needs}.")
    for note in notes:
        write_error(note)
    write_error("These settings fit together, and what they name on this machine is there. Not checked:")
    for item in not_checked_offline(settings):
        write_error(f"  {item}")
    return EXIT_COMPLETED
