"""The life of one instance: it takes part in the fleet until it is asked to stop or cannot go on, and leaves."""

import asyncio
import logging
import os
import time
from pathlib import Path

from generator_svc.activity import ActivityLog
from generator_svc.assignment_reader import AssignmentReader
from generator_svc.engine import Engine
from generator_svc.first_version import FirstVersion
from generator_svc.generate_loop import GenerateLoop
from generator_svc.membership import Membership, SchedulerConnection
from generator_svc.outbox import Outbox
from generator_svc.sample import ModelLimits
from generator_svc.settings import GeneratorSettings
from generator_svc.weight_switch import WeightSwitch
from generator_svc.weights_client import WeightsClient
from streamrl.errors import BrokerUnavailableError, EngineDiedError
from streamrl.kafka.connection import Connection
from streamrl.kafka.producer import RecordProducer
from streamrl.kafka.topics import Topics
from streamrl.spans import SpanLog
from streamrl.v1.scheduler_pb2 import EngineProfile, RegisterRequest

logger = logging.getLogger(__name__)

_SILENCE_S = 5.0
"""A scheduler that is not heard for so long while an instance drains is taken to be gone: the run may be ending."""
_LAST_WORDS_S = 2.0
"""For what is said and sent at an end that is not orderly."""
_FLUSH_S = 15.0


class Instance:
    """Everything of an instance that has an engine and may register."""

    def __init__(
        self,
        settings: GeneratorSettings,
        instance: str,
        *,
        address: str,
        connection: Connection,
        producer: RecordProducer,
        weights: WeightsClient,
        scheduler: SchedulerConnection,
        engine: Engine,
        first: FirstVersion,
        limits: ModelLimits,
        profile: EngineProfile | None,
    ) -> None:
        """
        Args:
            address: where its GeneratorService listens.
            engine: started.
            profile: of the engine; None: nobody knows.
        """
        run, topics = settings.run, Topics(settings.run.id)
        spans = SpanLog(producer, topics.spans, service="generator_svc", instance=instance, attempt=run.attempt)
        self._settings = settings
        self._engine = engine
        self._scheduler = scheduler
        self._activity = ActivityLog(spans)
        self._outbox = Outbox(producer, topics, attempt=run.attempt, instance=instance)
        self.weights = WeightSwitch(
            engine, weights, alarm_nats=settings.canary_alarm_nats, patience_s=settings.rpc.patience_s
        )
        self.loop = GenerateLoop(
            engine,
            self.weights,
            self._outbox,
            self._activity,
            swap=settings.weights.swap,
            lease_holds=scheduler.heartbeat.holds,
            say_now=scheduler.heartbeat.say_now,
        )
        self._reader = AssignmentReader(
            connection,
            topics.assignments,
            attempt=run.attempt,
            limits=limits,
            outbox=self._outbox,
            take=self.loop.take,
        )
        self.membership = Membership(
            scheduler,
            RegisterRequest(
                run_id=run.id,
                attempt=run.attempt,
                instance=instance,
                site=run.site,
                address=address,
                pid=os.getpid(),
                max_running=engine.max_running,
                kv_cache_tokens=engine.kv_cache_tokens,
                tokenizer_digest=first.tokenizer_digest,
                profile=profile,
            ),
            engine=engine,
            weights=self.weights,
            loop=self.loop,
            reader=self._reader,
            outbox=self._outbox,
            activity=self._activity,
        )

    async def live(self, stop: asyncio.Event) -> None:
        """Takes part until `stop` is set, then drains.

        Raises:
            StreamRLError: the engine died, the broker or a peer is gone, or a peer wants nothing of this instance.
        """
        try:
            async with asyncio.TaskGroup() as group:
                work = [
                    group.create_task(self.loop.run()),
                    group.create_task(self.membership.run()),
                    group.create_task(self._reader.failure()),
                    group.create_task(self._watch_engine()),
                ]
                await stop.wait()
                await self._drain()
                for task in work:
                    task.cancel()
        except ExceptionGroup as errors:
            error = _cause(errors)
            logger.error("the instance ends: %s", error)
            self._activity.become(None)
            await self._flush(_LAST_WORDS_S)
            await self.membership.leave(str(error), _LAST_WORDS_S)
            raise error from None
        finally:
            await self.weights.close()

    async def _watch_engine(self) -> None:
        """An engine that dies while nothing runs is missed only by the next batch, which is too late."""
        await self._engine.died()
        raise EngineDiedError("the inference engine died; its own lines above say why")

    async def _drain(self) -> None:
        """Gives back what has not begun, finishes what runs, and says goodbye."""
        heartbeat, deadline = self._scheduler.heartbeat, time.monotonic() + self._settings.generator.drain_timeout_s
        self.loop.give_back_unstarted()
        listens = True
        ended = asyncio.create_task(self.loop.nothing_runs())
        while not ended.done() and listens and (remaining_s := deadline - time.monotonic()) > 0:
            listens, _ = await asyncio.gather(
                heartbeat.answered(_SILENCE_S), asyncio.wait({ended}, timeout=min(remaining_s, _SILENCE_S))
            )
        ended.cancel()
        await self.loop.give_back_running(_LAST_WORDS_S)
        self._activity.become(None)
        await self._flush(_FLUSH_S if listens else _LAST_WORDS_S)
        if listens:
            await heartbeat.answered(_LAST_WORDS_S)
        await self.membership.leave("asked to stop", _LAST_WORDS_S)

    async def _flush(self, timeout_s: float) -> None:
        try:
            await asyncio.to_thread(self._outbox.flush, timeout_s)
        except BrokerUnavailableError as error:
            logger.warning("rollouts may be lost, and will be generated again: %s", error)


def model_folder(settings: GeneratorSettings, instance: str) -> Path:
    """Where an instance keeps the model's files."""
    return settings.run.folder / "services" / instance / "model"


def _cause(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error to report: an engine's death before what came of it, else the first."""
    first: BaseException | None = None
    for error in errors.exceptions:
        leaf = _cause(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(leaf, EngineDiedError):
            return leaf
        first = first or leaf
    assert first is not None
    return first
