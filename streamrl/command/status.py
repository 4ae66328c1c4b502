"""`streamrl status`: what a run does now, or how it ended, from its folder and its services."""

import asyncio
import contextlib
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from streamrl.command.display import LiveDisplay, error_console, output_console, run_table, show_summary
from streamrl.command.figures import duration
from streamrl.command.observer import Observation, Observer
from streamrl.command.report import EXIT_COMPLETED, write_error, write_json
from streamrl.command.runs import named_run
from streamrl.run_folder import RunFolder, RunRecord, ServiceRecord, first_problem
from streamrl.settings import ServiceSettings

_WATCH_EVERY_S = 1.0


def status(arguments: Namespace) -> int:
    """Runs the command. Raises ValueError when there is no such run."""
    folder = named_run(arguments.run)
    try:
        settings = ServiceSettings.model_validate(folder.read_settings())
    except ValidationError as error:
        raise folder.damaged_settings(first_problem(error)) from error
    return asyncio.run(_status(folder, settings, watch=arguments.watch, as_json=arguments.json))


async def _status(folder: RunFolder, settings: ServiceSettings, *, watch: bool, as_json: bool) -> int:
    async with Observer(settings.run.id, settings.rpc) as observer:

        async def observe() -> tuple[RunRecord, Observation]:
            record = folder.read_record()
            return record, await observer.observe() if record.state == "running" else Observation(None, None)

        record, observation = await observe()
        if watch and record.state == "running":
            display = LiveDisplay(error_console(), settings.generator.num_instances, _age_s(record))
            with contextlib.closing(display):
                record, observation = await _watch(observe, display, observation)
    if as_json:
        write_json(status_report(record, observation, folder.read_summary()))
    else:
        _show(folder, record, observation, settings.generator.num_instances)
    return EXIT_COMPLETED


async def _watch(
    observe: Callable[[], Awaitable[tuple[RunRecord, Observation]]], display: LiveDisplay, observation: Observation
) -> tuple[RunRecord, Observation]:
    """Draws the run until it is over."""
    while True:
        display.update(observation)
        await asyncio.sleep(_WATCH_EVERY_S)
        record, observation = await observe()
        if record.state != "running":
            return record, observation


def status_report(record: RunRecord, observation: Observation, summary: dict[str, Any] | None) -> dict[str, Any]:
    """The line of `status --json`: what is not known is null. A run that is over has no services."""
    trainer, fleet = observation.trainer, observation.fleet
    iteration = trainer.iteration if trainer is not None else (summary or {}).get("iterations")
    instances = {instance.instance: instance for instance in fleet.instances} if fleet is not None else {}
    services = []
    for service in record.services if record.state == "running" else ():
        entry: dict[str, Any] = {
            "service": service.service,
            "instance": service.instance,
            "pid": service.process.pid,
            "address": service.address or None,
            "weight_version": None,
            "running": None,
            "waiting": None,
        }
        if service.service == "trainer" and trainer is not None:
            entry |= {"weight_version": trainer.weight_version, "waiting": trainer.waiting_rollouts}
        elif (instance := instances.get(service.instance)) is not None:
            beat = instance.heartbeat
            entry |= {
                "address": instance.address,
                "weight_version": beat.weight_version,
                "running": beat.running,
                "waiting": beat.waiting,
            }
        services.append(entry)
    report: dict[str, Any] = {
        "run_id": record.run_id,
        "state": record.state,
        "iteration": iteration,
        "services": services,
    }
    return report | ({"error": record.error} if record.error is not None else {})


def _show(folder: RunFolder, record: RunRecord, observation: Observation, num_generators: int) -> None:
    console = output_console()
    if record.state == "running":
        console.print(f"run {record.run_id}: running (pid {record.process.pid})")
        console.print(run_table(observation, num_generators, _age_s(record)))
        for service in record.services:
            console.print(_service_line(service))
        return
    if record.state == "dead":
        console.print(f"run {record.run_id}: dead: its process (pid {record.process.pid}) ended without a word")
    else:
        console.print(f"run {record.run_id}: {record.state} after {duration(_age_s(record))}")
    if record.error is not None:
        console.print(f"error: {record.error['message']}", markup=False)
    summary = folder.read_summary()
    if summary is not None:
        try:
            # How a run ended is for its record to say: whoever wrote the summary may have ended before.
            show_summary({**summary, "status": record.state})
        except KeyError as error:
            raise folder.damaged_summary(f"expected figures of the whole run, and {error} is missing") from error
        except (TypeError, AttributeError, ValueError) as error:
            raise folder.damaged_summary("expected figures of the whole run, got values of other types") from error
    write_error(f"logs are in {folder.logs}")


def _age_s(record: RunRecord) -> float:
    """Seconds from the run's start to its end, or to now."""
    finished_s = datetime.fromisoformat(record.finished_at).timestamp() if record.finished_at else time.time()
    return finished_s - datetime.fromisoformat(record.started_at).timestamp()


def _service_line(service: ServiceRecord) -> str:
    times = "once" if service.restarts == 1 else f"{service.restarts} times"
    restarts = f", started again {times} in this attempt" if service.restarts else ""
    place = f" at {service.address}" if service.address else ""
    return f"{service.instance}: pid {service.process.pid}{place}{restarts}"
