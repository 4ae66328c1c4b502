"""Reads an instance's partition of topic `assignments` in a thread, and hands its own samples to the event loop."""

import asyncio
import logging
import time
from collections.abc import Callable

from google.protobuf.message import DecodeError

from generator_svc.outbox import Outbox
from generator_svc.rollouts import failed_rollout
from generator_svc.sample import ModelLimits, Sample, problem_of, samples_of
from streamrl.kafka.connection import Connection
from streamrl.kafka.reader import ReaderThread, Record, RecordReader, positions_after
from streamrl.v1.records_pb2 import Assignment

logger = logging.getLogger(__name__)


class AssignmentReader:
    """Reads for one incarnation after another. Records of other lives are skipped; those that nobody could handle go to
    dead-letters, and their samples, as far as they are known, are answered as failed."""

    def __init__(
        self,
        connection: Connection,
        topic: str,
        *,
        attempt: int,
        limits: ModelLimits,
        outbox: Outbox,
        take: Callable[[list[Sample]], None],
    ) -> None:
        """
        Args:
            take: gets samples of the incarnation that reads.
        """
        self._connection = connection
        self._topic = topic
        self._attempt = attempt
        self._limits = limits
        self._outbox = outbox
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[None] = self._loop.create_future()
        self._thread: ReaderThread | None = None
        self._incarnation = 0
        self._positions: dict[int, int] = {}

    def begin(self, incarnation: int, partition: int) -> None:
        """Reads on from where an earlier incarnation of this process stood in the partition, or from its beginning."""
        self._incarnation = incarnation
        self._thread = ReaderThread(
            RecordReader(self._connection, self._topic, {partition: self._positions.get(partition)}),
            on_records=lambda records: self._call_in_loop(self._handle, records, incarnation),
            on_error=lambda error: self._call_in_loop(self._fail, error),
        ).start()

    async def end(self) -> None:
        """Stops reading; what has been read is handled before this returns. Do it before another incarnation is asked
        for: its assignments may come at once, and this one would skip them."""
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.to_thread(thread.close)

    async def failure(self) -> None:
        """Waits for ever.

        Raises:
            BrokerUnavailableError: reading failed.
        """
        await self._failure

    def _fail(self, error: BaseException) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    def _call_in_loop(self, callback: Callable[..., None], *arguments: object) -> None:
        self._loop.call_soon_threadsafe(callback, *arguments)

    def _handle(self, records: list[Record], incarnation: int) -> None:
        self._positions.update(positions_after(records))
        skipped = 0
        samples: list[Sample] = []
        for record in records:
            try:
                assignment = Assignment.FromString(record.value)
            except DecodeError as error:
                self._outbox.give_up(record, f"it is not an Assignment: {error}")
                continue
            if assignment.attempt != self._attempt or assignment.incarnation != incarnation:
                skipped += 1
                continue
            asked = samples_of(assignment, time.time())
            if problem := problem_of(assignment, self._limits):
                self._outbox.give_up(record, problem)
                for sample in asked:
                    rollout = failed_rollout(sample, problem, time.time())
                    rollout.dispatch = sample.dispatch
                    self._outbox.send(rollout)
                continue
            samples.extend(asked)
        logger.debug("%s: %d samples, %d records of other lives skipped", records[-1], len(samples), skipped)
        if samples:
            self._take(samples)
