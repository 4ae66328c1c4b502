"""The loop that owns the ledger: take what came, decide, tell; beside it, dispatch and watch.

Everything that touches the ledger runs on one event loop. Calls of the control servicer change it and `wake` the loop,
records come from a thread by `take_records`; in between it sleeps until the next deadline. What takes long, plans and
looks at the fleet, is done in threads, on copies; what is much, records and assignments, in parts.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

from google.protobuf.message import DecodeError

from scheduler_svc.dispatcher import Draft, Outgoing, Placing
from scheduler_svc.ledger import Ledger
from streamrl.errors import RecordError
from streamrl.kafka.dead_letters import DeadLetters
from streamrl.kafka.producer import RecordProducer
from streamrl.kafka.reader import Record
from streamrl.kafka.topics import Topics
from streamrl.v1.records_pb2 import PromptRecord
from streamrl.v1.weights_pb2 import WatchResponse

logger = logging.getLogger(__name__)

_PART = 500
"""Records of prompts that are taken at once: about 10 ms."""
_LOOKING_SHARE = 12.0
"""Looking at the fleet takes one part of the time, and so many go by without."""


class ScheduleLoop:
    """Runs one ledger."""

    def __init__(self, ledger: Ledger, producer: RecordProducer, topics: Topics) -> None:
        self._ledger = ledger
        self._producer = producer
        self._topics = topics
        self._dead_letters = DeadLetters(
            producer, topics.dead_letters, service="scheduler_svc", attempt=ledger.settings.run.attempt
        )
        self._inbox: deque[Record] = deque()
        self._woken = asyncio.Event()
        self._decided = asyncio.Event()
        self._may_look = asyncio.Event()
        self._refused_before = 0

    def wake(self) -> None:
        """Something has changed: the loop decides again. Call it on the event loop."""
        self._woken.set()

    def take_records(self, records: Sequence[Record]) -> None:
        """Records of topic `prompts`. Call it on the event loop."""
        self._inbox += records
        self.wake()

    def take_version(self, announced: WatchResponse) -> None:
        """An announcement of weights_svc. Call it on the event loop.

        Raises:
            StaleAttemptError: as Ledger.announce.
        """
        logger.info("version %d is announced", announced.weight_version)
        self._ledger.announce(announced.weight_version, announced.attempt)
        self.wake()

    async def run(self, tell: Callable[[], None]) -> None:
        """Goes on until it is cancelled.

        Args:
            tell: called after each round, when instances and waiting calls can be told what is new.

        Raises:
            BrokerUnavailableError: a record could not be delivered.
            StaleAttemptError: a later life of the run has begun.
        """
        while True:
            await self._until_due()
            self._read()
            self._ledger.advance(time.monotonic())
            tell()
            self._decided.set()
            self._may_look.set()

    async def dispatch(self, tell: Callable[[], None]) -> None:
        """Gives to instances what waits after each round of `run`. It goes on until it is cancelled. Arguments and
        errors are those of `run`."""
        while True:
            await self._decided.wait()
            self._decided.clear()
            while (draft := self._ledger.draft(time.monotonic())) is not None:
                await self._carry_out(draft)
            if (draft := self._ledger.draft_ahead(time.monotonic())) is not None:
                await self._plan(draft)
            self._ledger.balance(time.monotonic())
            tell()

    async def _plan(self, draft: Draft) -> list[list[Placing]]:
        for _ in draft.parts():
            await asyncio.sleep(0)
        return await asyncio.to_thread(draft.plan)

    async def _carry_out(self, draft: Draft) -> None:
        num_samples = num_assignments = 0
        for placings in await self._plan(draft):
            outgoing = self._ledger.carry_out(draft, placings, time.monotonic())
            self._write(outgoing)
            num_samples += sum(len(record.assignment.draws) for record in outgoing)
            num_assignments += len(outgoing)
            await asyncio.sleep(0)
        logger.info("%s: %d samples are dispatched in %d assignments", draft.batch.key, num_samples, num_assignments)

    async def watch_progress(self) -> None:
        """Looks again and again at what should move from one instance to another, and has it asked for. It never
        returns. What takes long, in a large fleet, is done in a thread, and takes a fraction of the time at most."""
        while True:
            await self._may_look.wait()
            self._may_look.clear()
            started = time.monotonic()
            picture = self._ledger.picture(started)
            if picture is None:
                continue
            for _ in picture.parts():
                await asyncio.sleep(0)
            wishes = await asyncio.to_thread(picture.look)
            if asked := self._ledger.ask_for_moves(wishes, time.monotonic()):
                logger.info("%d samples are asked for, to go on elsewhere", asked)
                self.wake()
            # There is nothing new before the next heartbeats.
            await asyncio.sleep(max(self._ledger.heartbeat_interval_s(), _LOOKING_SHARE * (time.monotonic() - started)))

    async def _until_due(self) -> None:
        if self._inbox:
            # More has come than is taken at once.
            await asyncio.sleep(0)
            return
        now = time.monotonic()
        deadline = self._ledger.next_deadline(now)
        timeout_s = None if deadline is None else max(0.0, deadline - now)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._woken.wait(), timeout_s)
        self._woken.clear()

    def _read(self) -> None:
        for _ in range(min(len(self._inbox), _PART)):
            record = self._inbox.popleft()
            try:
                self._ledger.take_record(_parse(record))
            except RecordError as error:
                self._bury(record, str(error))
        if self._ledger.refused != self._refused_before:
            self._refused_before = self._ledger.refused
            logger.warning("%d calls of earlier attempts were refused so far", self._ledger.refused)

    def _write(self, outgoing: Sequence[Outgoing]) -> None:
        for record in outgoing:
            assignment = record.assignment
            try:
                self._producer.send(
                    self._topics.assignments, assignment.SerializeToString(), partition=record.partition
                )
            except RecordError as error:
                self._ledger.undeliverable(assignment, str(error))

    def _bury(self, record: Record, reason: str) -> None:
        self._ledger.dead_letters += 1
        self._dead_letters.send(record, reason)


def _parse(record: Record) -> PromptRecord:
    try:
        return PromptRecord.FromString(record.value)
    except DecodeError as error:
        raise RecordError(f"it is no PromptRecord: {error}") from error
