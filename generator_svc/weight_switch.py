"""Brings an engine from one weight version to another: negotiate, fetch, load, score the canaries, acknowledge.

A version whose canaries are off is fetched anew, whole, and loaded again: loading may fail without an error, and a
digest says nothing about what has become of the bytes since.

When to go where is decided in version_gate.py.
"""

import asyncio
import logging
from collections.abc import Coroutine

from generator_svc.canaries import Agreement, score_canaries
from generator_svc.engine import Engine, SwitchReport
from generator_svc.patience import patiently
from generator_svc.version_gate import Target
from generator_svc.weights_client import WeightsClient
from streamrl.errors import RefusedError, StaleAttemptError, StreamRLError, UnavailableError, WeightTransferError
from streamrl.v1.weights_pb2 import AcknowledgeRequest, VersionManifest

logger = logging.getLogger(__name__)


class VersionGoneError(StreamRLError):
    """The version that was asked for is not held any more."""


class WeightSwitch:
    """Knows what the engine has. One switch at a time."""

    def __init__(self, engine: Engine, weights: WeightsClient, *, alarm_nats: float, patience_s: float) -> None:
        self._engine = engine
        self._weights = weights
        self._alarm_nats = alarm_nats
        self._patience_s = patience_s
        self._near: VersionManifest | None = None
        self._asked_for = -1
        self._switching = False
        self._background: set[asyncio.Task[None]] = set()
        self._heals = True
        """Whether fetching anew may be worth it: not where it has not helped, for the two compute differently then."""
        self.loaded = -1
        """-1 before the first version."""

    async def loaded_first(self, manifest: VersionManifest, report: SwitchReport) -> None:
        """The engine has started with its first version."""
        await self._loaded(manifest, report)

    def prefetch(self, weight_version: int) -> None:
        """Begins to bring an announced version near, beside generation. Best effort, and may be asked for again and
        again: the switch itself insists."""
        if self._switching or weight_version <= max(self.loaded, self._asked_for):
            return
        self._asked_for = weight_version
        self._in_background(self._prefetch(weight_version))

    async def switch(self, target: Target) -> SwitchReport:
        """Goes to a version, patiently.

        Raises:
            VersionGoneError: exactly this version was asked for, and it is not held any more.
            WeightTransferError, UnavailableError: it could not be had for `patience_s`.
            EngineDiedError: loading failed.
        """
        self._switching = True
        try:
            return await patiently(
                lambda: self._try_switch(target), self._patience_s, (WeightTransferError, UnavailableError)
            )
        finally:
            self._switching = False

    async def close(self) -> None:
        """Ends what runs beside."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def _try_switch(self, target: Target) -> SwitchReport:
        manifest = await self._manifest(target)
        report = await self._engine.switch(manifest)
        logger.info(
            "version=%d loaded: fetched in %.2f s, switched in %.3f s",
            manifest.weight_version,
            report.fetch_s,
            report.switch_s,
        )
        await self._loaded(manifest, report)
        return report

    async def _manifest(self, target: Target) -> VersionManifest:
        near, self._near, self._asked_for = self._near, None, -1
        version = target.weight_version
        if near is not None and (
            near.weight_version == version or (near.weight_version > version and not target.exact)
        ):
            return near
        try:
            if target.exact:
                return (await self._weights.negotiate(exactly=version)).manifest
            return (await self._weights.negotiate(at_least=version)).manifest
        except StaleAttemptError:
            raise
        except RefusedError as error:
            if target.exact:
                raise VersionGoneError(str(error)) from error
            # It was announced: weights_svc may have come back and not yet read what it holds.
            raise WeightTransferError(f"version {version} cannot be had: {error}") from error

    async def _prefetch(self, weight_version: int) -> None:
        try:
            manifest = (await self._weights.negotiate(at_least=weight_version)).manifest
        except (UnavailableError, RefusedError) as error:
            logger.warning("version=%d is not fetched ahead: %s", weight_version, error)
            self._asked_for = -1
            return
        if manifest.weight_version > self.loaded and not self._switching:
            self._near = manifest
            self._engine.prefetch(manifest)

    async def _loaded(self, manifest: VersionManifest, report: SwitchReport) -> None:
        self.loaded = manifest.weight_version
        agreement = await self._score(manifest)
        if not agreement.is_off(self._alarm_nats):
            self._heals = True
        elif self._heals:
            logger.warning("version=%d is fetched anew, and whole", manifest.weight_version)
            self._engine.forget_fetched()
            report = await self._engine.switch(manifest)
            agreement = await self._score(manifest)
            self._heals = not agreement.is_off(self._alarm_nats)
        self._in_background(
            self._acknowledge(
                AcknowledgeRequest(
                    weight_version=manifest.weight_version,
                    digest=report.digest,
                    fetch_s=report.fetch_s,
                    switch_s=report.switch_s,
                    canary_abs_diff_mean=agreement.abs_diff_mean,
                    canary_abs_diff_max=agreement.abs_diff_max,
                    canary_num_tokens=agreement.num_tokens,
                )
            )
        )

    async def _score(self, manifest: VersionManifest) -> Agreement:
        return await score_canaries(self._engine, manifest, self._alarm_nats)

    async def _acknowledge(self, outcome: AcknowledgeRequest) -> None:
        try:
            await self._weights.acknowledge(outcome)
        except (UnavailableError, RefusedError) as error:
            logger.warning("version=%d could not be acknowledged: %s", outcome.weight_version, error)

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
