"""Entry point of trainer_svc: gRPC on this thread's event loop, training in a thread of its own.

Rank 0 is the service. The other ranks are copies of this process that follow it and speak to nobody else; on another
machine than rank 0's the first of them answers health checks, since whatever started it there may ask.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from grpc_health.v1 import health

from streamrl import service
from streamrl.rpc.server import Server
from streamrl.v1.trainer_pb2_grpc import add_TrainerServiceServicer_to_server
from trainer_svc.control import TrainerControl
from trainer_svc.control_servicer import ControlServicer
from trainer_svc.preflight import check
from trainer_svc.settings import TrainerSettings

logger = logging.getLogger(__name__)


Train = Callable[[TrainerSettings, TrainerControl, str], None]
"""Trains until the run is over, in a thread of its own."""


def _train(settings: TrainerSettings, control: TrainerControl, instance: str) -> None:
    # Torch and its friends take seconds to import: only here, where settings are known to be good.
    from trainer_svc.rank import run_rank

    command = [sys.executable, "-m", "trainer_svc", *sys.argv[1:]]
    run_rank(settings, control, instance, command=command, environment=os.environ)


async def serve(settings: TrainerSettings, instance: str, stop: asyncio.Event, train: Train = _train) -> None:
    """Trains until the run is over, or until it is stopped.

    Args:
        train: benchmarks have devices of their own.

    Raises:
        StreamRLError: the run failed.
        ValueError: what the settings name cannot be used.
    """
    control = TrainerControl()
    if "RANK" not in os.environ and os.environ.get("NODE_RANK", "0") != "0":
        await _lead_node(settings, control, instance)
        return
    if os.environ.get("RANK", "0") != "0":
        # Rank 0 says when to stop, and this process dies with it.
        await _in_thread(train, settings, control, instance)
        return
    for name, address in (("scheduler", settings.rpc.scheduler_address), ("weights", settings.rpc.weights_address)):
        if address.endswith(":0"):
            raise ValueError(f"rpc.{name}_address is {address}: expected the port of a {name}_svc")
    servicer = ControlServicer(
        control,
        run_id=settings.run.id,
        attempt=settings.run.attempt,
        num_iterations=settings.trainer.num_iterations,
    )
    server = Server(
        "streamrl.v1.TrainerService", lambda grpc_server: add_TrainerServiceServicer_to_server(servicer, grpc_server)
    )
    await server.serve(settings.rpc.trainer_address)
    stopping = asyncio.create_task(_ask_to_stop(stop, control))
    try:
        await _in_thread(train, settings, control, instance)
    finally:
        stopping.cancel()
        await server.stop()


async def _lead_node(settings: TrainerSettings, control: TrainerControl, instance: str) -> None:
    server = Server(health.SERVICE_NAME, lambda _grpc_server: None)
    await server.serve(settings.rpc.trainer_address)
    try:
        # Rank 0 says when to stop: this process ends when that one does.
        await _in_thread(_train, settings, control, instance)
    finally:
        await server.stop()


async def _ask_to_stop(stop: asyncio.Event, control: TrainerControl) -> None:
    await stop.wait()
    logger.info("asked to stop: the run ends after this iteration")
    control.ask_stop()


async def _in_thread(work: Callable[..., None], *arguments: object) -> None:
    """Runs work in a thread of its own, and not a pool's: ranks that it starts are tied to its life."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="train") as executor:
        await asyncio.get_running_loop().run_in_executor(executor, work, *arguments)


SERVICE = service.Service("trainer_svc", TrainerSettings, serve, check)


def main() -> int:
    """`python -m trainer_svc SETTINGS.json`."""
    return service.main(SERVICE)
