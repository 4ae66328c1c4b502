"""Brings weight versions near while the engine generates: one fetch at a time, in a thread of its own."""

import asyncio
import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor

from generator_svc.fabric_receiver import FabricReceiver
from generator_svc.version_buffer import VersionBuffer
from generator_svc.weight_fetcher import FetchedVersion, WeightFetch, WeightSource
from streamrl.errors import WeightTransferError
from streamrl.v1.weights_pb2 import VersionManifest

logger = logging.getLogger(__name__)


class Prefetcher:
    """Holds at most one version that is on its way or has arrived, what later versions are adapters of, and with
    `keep_base` the version that was taken last. Lives on one event loop."""

    def __init__(self, source: WeightSource, fabric: FabricReceiver | None = None) -> None:
        """
        Args:
            fabric: this instance's place on `WeightSource.fabric`. It belongs to the prefetcher, which closes it.
        """
        self._source = source
        self._fabric = fabric
        # Two threads, for a cancelled fetch may still be ending when the next one begins.
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="weight-fetch")
        self._manifest: VersionManifest | None = None
        self._base: VersionBuffer | None = None
        self._adapted: VersionBuffer | None = None
        self._fetch: WeightFetch | None = None
        self._result: asyncio.Future[FetchedVersion] | None = None

    def begin(self, manifest: VersionManifest) -> None:
        """Begins to fetch. A version that is on its way already, or is there, stays; another one is dropped."""
        known = self._manifest
        # Versions may have the same weights, and a version that a run has gone back behind comes again with others.
        if known is not None and _name(known) == _name(manifest) and not self._failed():
            return
        self._drop()
        if self._fabric is not None:
            self._fabric.start()
        base = None if self._base is None else self._base.share()
        fetch = WeightFetch(self._source, manifest, base, self._fabric, self._adapted_by(manifest))
        self._manifest, self._fetch = manifest, fetch
        self._result = asyncio.get_running_loop().run_in_executor(self._threads, fetch.run)
        self._result.add_done_callback(_log_failure)

    async def take(self, manifest: VersionManifest) -> FetchedVersion:
        """Waits for a version, begun now if it was not before or if that failed; it is then the caller's to close.

        Raises:
            WeightTransferError: it could not be fetched, or another version was asked for meanwhile.
        """
        self.begin(manifest)
        result = self._result
        assert result is not None
        try:
            fetched = await asyncio.shield(result)
        except asyncio.CancelledError:
            if result.cancelled():
                raise WeightTransferError(f"version {manifest.weight_version} was dropped for another one") from None
            raise
        if self._result is not result:
            raise WeightTransferError(f"version {manifest.weight_version} was dropped for another one")
        self._manifest = self._fetch = self._result = None
        if self._source.keep_base:
            if self._base is not None:
                self._base.close()
            self._base = fetched.buffer.share()
        self._keep_adapted(fetched)
        return fetched

    def _adapted_by(self, manifest: VersionManifest) -> VersionBuffer | None:
        """What the version's adapters are added to, if it is kept."""
        kept = self._adapted
        return kept.share() if kept is not None and kept.manifest.digest == manifest.adapter.base_digest else None

    def _keep_adapted(self, fetched: FetchedVersion) -> None:
        """Keeps what later versions are adapters of, and nothing of the kind once versions come whole."""
        adapted = fetched.buffer if fetched.manifest.is_base else fetched.adapted
        kept, self._adapted = self._adapted, None if adapted is None else adapted.share()
        if kept is not None:
            kept.close()

    def forget(self) -> None:
        """Ends what is on its way, and gives back what has arrived and what is kept."""
        self._drop()
        for kept in (self._base, self._adapted):
            if kept is not None:
                kept.close()
        self._base = self._adapted = None

    def close(self) -> None:
        """As `forget`, for good."""
        self.forget()
        if self._fabric is not None:
            self._fabric.close()
        self._threads.shutdown(wait=False)

    def _failed(self) -> bool:
        result = self._result
        return result is not None and result.done() and (result.cancelled() or result.exception() is not None)

    def _drop(self) -> None:
        fetch, result = self._fetch, self._result
        self._manifest = self._fetch = self._result = None
        if fetch is not None and result is not None:
            fetch.cancel()
            result.add_done_callback(_close_buffer)


def _name(manifest: VersionManifest) -> tuple[int, str]:
    return manifest.weight_version, manifest.digest


def _close_buffer(result: "asyncio.Future[FetchedVersion]") -> None:
    with contextlib.suppress(WeightTransferError, asyncio.CancelledError):
        result.result().close()


def _log_failure(result: "asyncio.Future[FetchedVersion]") -> None:
    if not result.cancelled() and isinstance(error := result.exception(), WeightTransferError):
        logger.warning("a weight version could not be fetched: %s", error)
