"""Entry of generator_svc: gets an instance its engine, its first weight version and its connections, and ends them."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor

from generator_svc import engines
from generator_svc.control_servicer import ControlServicer
from generator_svc.engine import Engine
from generator_svc.first_version import FirstVersion
from generator_svc.instance import Instance, model_folder
from generator_svc.membership import SchedulerConnection
from generator_svc.profiler import profile_of
from generator_svc.sample import ModelLimits
from generator_svc.settings import GeneratorSettings
from generator_svc.weight_fetcher import WeightSource
from generator_svc.weights_client import WeightsClient
from streamrl import service
from streamrl.errors import BrokerUnavailableError
from streamrl.kafka.connection import Connection
from streamrl.kafka.producer import RecordProducer
from streamrl.kafka.topics import Topics, create_topics
from streamrl.rpc.server import Server
from streamrl.v1.generator_pb2_grpc import add_GeneratorServiceServicer_to_server

logger = logging.getLogger(__name__)

SERVICE_NAME = "streamrl.v1.GeneratorService"

EngineMaker = Callable[[GeneratorSettings, str, ModelLimits, WeightSource], Engine]

_CLOSE_PRODUCER_S = 2.0


async def serve(
    settings: GeneratorSettings, instance: str, stop: asyncio.Event, make_engine: EngineMaker = engines.make_engine
) -> None:
    """Runs one instance until `stop` is set and it has drained.

    Args:
        make_engine: tests have engines of their own.

    Raises:
        ValueError: an address is not final or not free, or the model's config does not say what it must.
        StreamRLError: the engine died, or the broker or a peer is gone or refuses.
    """
    for name in ("weights_address", "scheduler_address"):
        if getattr(settings.rpc, name).endswith(":0"):
            raise ValueError(
                f"rpc.{name} is {getattr(settings.rpc, name)}: expected the port that the service listens on"
            )
    async with contextlib.AsyncExitStack() as ending:
        servicer = ControlServicer(settings.run.id, instance, stop)
        server = Server(SERVICE_NAME, lambda grpc_server: add_GeneratorServiceServicer_to_server(servicer, grpc_server))
        address = await server.serve(settings.rpc.generator_address)
        ending.push_async_callback(server.stop)

        started = await _unless(stop, _start(settings, instance, address, make_engine, ending))
        if started is not None:
            servicer.control(started.loop, started.membership, started.weights)
            await started.live(stop)


async def _start(
    settings: GeneratorSettings,
    instance: str,
    address: str,
    make_engine: EngineMaker,
    ending: contextlib.AsyncExitStack,
) -> Instance:
    """Everything up to the registration. What it opens is closed by `ending`."""
    # A thread that nobody waits for: an instance that is asked to end meanwhile ends.
    preloader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="preload")
    ending.callback(preloader.shutdown, wait=False)
    preloaded = asyncio.get_running_loop().run_in_executor(preloader, engines.preload, settings, instance)
    connection = Connection(settings.kafka, instance)
    await asyncio.to_thread(connection.check)
    topics = Topics(settings.run.id)
    await asyncio.to_thread(
        create_topics, connection, topics, settings.scheduler.max_instances, names=topics.of_generation_site
    )
    producer = RecordProducer(connection)
    ending.push_async_callback(_close, producer)
    weights = WeightsClient(
        settings.rpc, run_id=settings.run.id, attempt=settings.run.attempt, receiver=instance, site=settings.run.site
    )
    ending.push_async_callback(weights.close)
    scheduler = SchedulerConnection(settings.rpc)
    ending.push_async_callback(scheduler.close)

    first = await FirstVersion.wait_for(weights, model_folder(settings, instance))
    limits = ModelLimits.of(first.model_folder, settings.generator.max_model_len)
    await preloaded
    engine = make_engine(settings, instance, limits, _weight_source(settings, instance))
    ending.push_async_callback(engine.stop)
    report = await engine.start(first.model_folder, first.manifest)
    logger.info("the engine has started with version=%d, fetched in %.2f s", report.weight_version, report.fetch_s)
    started = Instance(
        settings,
        instance,
        address=address,
        connection=connection,
        producer=producer,
        weights=weights,
        scheduler=scheduler,
        engine=engine,
        first=first,
        limits=limits,
        profile=await profile_of(engine, limits, settings.generator.profile_s, settings.generator.profile),
    )
    await started.weights.loaded_first(first.manifest, report)
    return started


def _weight_source(settings: GeneratorSettings, instance: str) -> WeightSource:
    return WeightSource(
        address=settings.rpc.weights_address,
        run_id=settings.run.id,
        attempt=settings.run.attempt,
        receiver=instance,
        site=settings.run.site,
        keep_base=settings.weights.keep_base,
        fabric=settings.weights.fabric,
        patience_s=settings.rpc.patience_s,
    )


async def _unless(stop: asyncio.Event, work: Coroutine[None, None, Instance]) -> Instance | None:
    """What the work gives; None when `stop` was set before."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


async def _close(producer: RecordProducer) -> None:
    """What had to be delivered has been flushed before; the rest are spans."""
    try:
        await asyncio.to_thread(producer.close, _CLOSE_PRODUCER_S)
    except BrokerUnavailableError as error:
        logger.warning("the producer ends: %s", error)


def main(argv: list[str] | None = None) -> int:
    """`python -m generator_svc SETTINGS.json --instance generator-0`."""
    return service.main(service.Service("generator_svc", GeneratorSettings, serve, engines.check), argv)
