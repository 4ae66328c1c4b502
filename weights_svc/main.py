"""Starts weights_svc."""

import asyncio

from streamrl import service
from streamrl.rpc.server import Server
from weights_svc.announcements import Announcements
from weights_svc.control_servicer import SERVICE_NAME, WeightsServicer
from weights_svc.ledger import Ledger
from weights_svc.receivers import Receivers
from weights_svc.retention_loop import RetentionLoop
from weights_svc.settings import WeightsServiceSettings
from weights_svc.store import VersionStore


def check(settings: WeightsServiceSettings) -> None:
    """
    Raises:
        ValueError: the run has no name, or its folder cannot be written.
    """
    if not settings.run.id:
        raise ValueError("run.id is empty: expected the name of the run")
    folder = settings.run.folder / "weights"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"run.dir: cannot make {folder}: {error}") from error


async def serve(settings: WeightsServiceSettings, _instance: str, stop: asyncio.Event) -> None:
    """Hands out the versions in the run's folder until `stop` is set.

    Raises:
        ValueError: the address is taken.
        RefusedError: another process keeps the folder.
        OSError: the disk failed.
    """
    check(settings)
    folder = settings.run.folder / "weights"
    ledger = Ledger(folder / "ledger.json", settings.run.attempt)
    receivers, announcements = Receivers(), Announcements()
    with VersionStore(folder, ledger) as store:
        found = store.scan()
        retention = RetentionLoop(store, receivers, announcements, keep_versions=settings.weights.keep_versions)
        servicer = WeightsServicer(
            settings.run.id,
            store,
            ledger,
            receivers,
            announcements,
            retention,
            chunk_bytes=settings.weights.chunk_bytes,
        )
        server = Server(SERVICE_NAME, servicer.register)
        await server.serve(settings.rpc.weights_address)
        retaining = asyncio.create_task(retention.run(found))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({retaining, stopping}, return_when=asyncio.FIRST_COMPLETED)
        announcements.close()
        await server.stop()
        stopping.cancel()
        if retaining.done():
            retaining.result()
        retaining.cancel()


SERVICE = service.Service("weights_svc", WeightsServiceSettings, serve, check)


def main(argv: list[str] | None = None) -> int:
    return service.main(SERVICE, argv)
