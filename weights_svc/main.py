"""Starts weights_svc."""

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

from streamrl import service
from streamrl.fabric import member
from streamrl.rpc.server import Server
from weights_svc.announcements import Announcements
from weights_svc.arrivals import Arrivals
from weights_svc.control_servicer import SERVICE_NAME, WeightsServicer
from weights_svc.fabric_sender import FabricSender
from weights_svc.ledger import Ledger
from weights_svc.pacing import Pacer
from weights_svc.receivers import Receivers
from weights_svc.relay_loop import RelayLoop
from weights_svc.retention_loop import RetentionLoop
from weights_svc.settings import WeightsServiceSettings
from weights_svc.store import VersionStore
from weights_svc.upstream import Upstream


def check(settings: WeightsServiceSettings) -> None:
    """
    Raises:
        ValueError: the run has no name, its folder cannot be written, or a relay is its own upstream.
    """
    if not settings.run.id:
        raise ValueError("run.id is empty: expected the name of the run")
    if settings.weights.upstream == settings.rpc.weights_address:
        raise ValueError(f"weights.upstream is {settings.weights.upstream}, where this weights_svc itself listens")
    folder = folder_of(settings)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"run.dir: cannot make {folder}: {error}") from error


def folder_of(settings: WeightsServiceSettings) -> Path:
    """Where the versions lie: a relay may stand on the machine of its origin."""
    is_relay = settings.weights.upstream is not None
    return settings.run.folder / (f"weights-{settings.run.site or 'relay'}" if is_relay else "weights")


async def serve(
    settings: WeightsServiceSettings,
    instance: str,
    stop: asyncio.Event,
    member_command: Sequence[str] = member.COMMAND,
) -> None:
    """Hands out the versions in the run's folder until `stop` is set; a relay brings them from its upstream.

    Args:
        member_command: tests have a fabric of their own.

    Raises:
        ValueError: the address is taken.
        RefusedError: another process keeps the folder, or the upstream refuses this relay.
        OSError: the disk failed.
    """
    check(settings)
    folder = folder_of(settings)
    ledger = Ledger(folder / "ledger.json", settings.run.attempt)
    receivers, announcements, arrivals = Receivers(), Announcements(), Arrivals()
    with VersionStore(folder, ledger) as store:
        found = store.scan()
        retention = RetentionLoop(store, receivers, announcements, keep_versions=settings.weights.keep_versions)
        async with contextlib.AsyncExitStack() as ending:
            relay: RelayLoop | None = None
            if settings.weights.upstream is not None:
                upstream = _upstream(settings, instance, settings.weights.upstream)
                ending.push_async_callback(upstream.close)
                pacer = Pacer(settings.weights.max_bytes_per_s)
                relay = RelayLoop(upstream, store, ledger, receivers, announcements, arrivals, retention, pacer)
            fabric: FabricSender | None = None
            if settings.weights.fabric:
                place = member.FabricMember(member_command)
                fabric = FabricSender(settings.weights.fabric, settings.run.site, place, ledger)
                ending.push_async_callback(fabric.close)
            servicer = WeightsServicer(
                settings.run.id,
                store,
                ledger,
                receivers,
                announcements,
                arrivals,
                retention,
                relay,
                fabric,
                chunk_bytes=settings.weights.chunk_bytes,
                anchor_every=settings.weights.anchor_every,
            )
            server = Server(SERVICE_NAME, servicer.register)
            await server.serve(settings.rpc.weights_address)
            work = [asyncio.create_task(retention.run(found))]
            if relay is not None:
                work.append(asyncio.create_task(relay.run()))
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait({*work, stopping}, return_when=asyncio.FIRST_COMPLETED)
            announcements.close()
            await server.stop()
            stopping.cancel()
            ended = [task for task in work if task.done()]
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            for task in ended:
                task.result()


def _upstream(settings: WeightsServiceSettings, instance: str, address: str) -> Upstream:
    return Upstream(
        address,
        run_id=settings.run.id,
        receiver=f"{instance}@{settings.run.site}" if settings.run.site else instance,
        site=settings.run.site,
        serving_address=settings.weights.found_at or settings.rpc.weights_address,
        deadline_s=settings.rpc.deadline_s,
        num_connections=settings.weights.num_connections,
    )


SERVICE = service.Service("weights_svc", WeightsServiceSettings, serve, check)


def main(argv: list[str] | None = None) -> int:
    return service.main(SERVICE, argv)
