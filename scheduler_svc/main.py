"""Entry of scheduler_svc: connects the ledger's loop with Kafka, its server and weights_svc, and ends them in order."""

import asyncio
import importlib.util
import logging
import time
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from pathlib import Path

from scheduler_svc.control_servicer import SchedulerServicer
from scheduler_svc.known_lengths import read_known_lengths
from scheduler_svc.ledger import Ledger
from scheduler_svc.lengths import LengthEstimates
from scheduler_svc.ranker.process import RankerProcess
from scheduler_svc.schedule_loop import ScheduleLoop
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.version_watch import watch_versions
from streamrl import service
from streamrl.hub_name import is_hub_name
from streamrl.kafka.connection import Connection
from streamrl.kafka.producer import RecordProducer
from streamrl.kafka.reader import ReaderThread, Record, RecordReader, all_partitions
from streamrl.kafka.topics import Topics, create_topics
from streamrl.rpc.server import Server
from streamrl.v1.scheduler_pb2_grpc import add_SchedulerServiceServicer_to_server

logger = logging.getLogger(__name__)

RANKER_FOLDER = "ranker"
"""In the run's folder."""

SERVICE_NAME = "streamrl.v1.SchedulerService"


async def serve(settings: SchedulerSettings, instance: str, stop: asyncio.Event) -> None:
    """Runs the scheduler until `stop` is set.

    Raises:
        ValueError: an address is not final or not free.
        StreamRLError: the broker or weights_svc is gone, or a later life of the run has begun.
    """
    if settings.rpc.weights_address.endswith(":0"):
        raise ValueError(f"rpc.weights_address is {settings.rpc.weights_address}: expected the port of a weights_svc")
    connection = Connection(settings.kafka, instance)
    await asyncio.to_thread(connection.check)
    topics = Topics(settings.run.id)
    await asyncio.to_thread(create_topics, connection, topics, settings.scheduler.max_instances)

    lengths = LengthEstimates(known_lengths=_known_lengths(settings), uses_ranker=_uses_ranker(settings))
    # Unix time in ms: above that of every earlier life, also above the incarnations that it gave out.
    incarnation = time.time_ns() // 1_000_000
    ledger = Ledger(settings, incarnation=incarnation, started_at=time.monotonic(), lengths=lengths)
    async with AsyncExitStack() as at_end:
        producer = RecordProducer(connection)
        at_end.push_async_callback(asyncio.to_thread, producer.close)
        loop = ScheduleLoop(ledger, producer, topics)
        servicer = SchedulerServicer(ledger, loop.wake)
        server = Server(SERVICE_NAME, lambda grpc_server: add_SchedulerServiceServicer_to_server(servicer, grpc_server))
        await server.serve(settings.rpc.scheduler_address)
        at_end.push_async_callback(server.stop)
        reading, broken = _read_prompts(RecordReader(connection, topics.prompts, all_partitions(1)), loop)
        at_end.push_async_callback(asyncio.to_thread, reading.close)
        ranker = RankerProcess(
            lengths,
            settings.run.folder / RANKER_FOLDER,
            settings.scheduler.ranker_base_model,
            settings.run.seed,
            loop.wake,
        )

        def after_round() -> None:
            servicer.tell()
            ranker.look()

        await _first_of(
            stop.wait(),
            broken,
            loop.run(after_round),
            loop.dispatch(after_round),
            loop.watch_progress(),
            *([ranker.run()] if lengths.uses_ranker else []),
            watch_versions(settings.rpc, settings.run.id, instance, loop.take_version),
        )


def _read_prompts(reader: RecordReader, loop: ScheduleLoop) -> tuple[ReaderThread, asyncio.Future[None]]:
    """A thread that reads into the loop, and a future that fails when it does."""
    event_loop = asyncio.get_running_loop()
    broken: asyncio.Future[None] = event_loop.create_future()

    def fail(error: BaseException) -> None:
        if not broken.done():
            broken.set_exception(error)

    def hand_over(records: list[Record]) -> None:
        event_loop.call_soon_threadsafe(loop.take_records, records)

    def on_error(error: BaseException) -> None:
        event_loop.call_soon_threadsafe(fail, error)

    return ReaderThread(reader, hand_over, on_error).start(), broken


async def _first_of(*awaitables: Awaitable[object]) -> None:
    """Waits until one of them ends, cancels the others, and raises what it raised."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


def _known_lengths(settings: SchedulerSettings) -> dict[str, list[float]]:
    file = settings.scheduler.length_file
    return {} if file is None else read_known_lengths(file)


def _uses_ranker(settings: SchedulerSettings) -> bool:
    if settings.scheduler.length_model != "ranker":
        return False
    if importlib.util.find_spec("torch") is None:
        logger.warning("PyTorch is not installed here: lengths are foretold from earlier answers to a prompt alone")
        return False
    return True


def check(settings: SchedulerSettings) -> None:
    """
    Raises:
        ValueError: what the settings name is not here.
    """
    _known_lengths(settings)
    if base_model := settings.scheduler.ranker_base_model:
        _check_base_model(base_model)


def _check_base_model(path: str) -> None:
    if Path(path).is_dir():
        if not Path(path, "config.json").is_file():
            raise ValueError(
                f"scheduler.ranker_base_model: {path} has no config.json: expected the folder of a causal language "
                "model in Hugging Face's layout"
            )
    elif not is_hub_name(path):
        raise ValueError(
            f"scheduler.ranker_base_model: there is no folder {path} (looked in {Path.cwd()}), and it is no hub name "
            "(owner/name)"
        )


def main() -> int:
    """`python -m scheduler_svc SETTINGS.json`."""
    return service.main(service.Service("scheduler_svc", SchedulerSettings, serve, check))
