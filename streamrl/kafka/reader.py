"""A reader of given partitions from given positions. No consumer group decides who reads what: we do."""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from streamrl.errors import BrokerUnavailableError
from streamrl.kafka.connection import Connection
from streamrl.kafka.offset_sequence import OffsetSequence
from streamrl.kafka.outage import TRANSIENT, Outage
from streamrl.settings import KafkaSection

logger = logging.getLogger(__name__)

_BATCH = 500
_ANSWER_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Record:
    """One record as read."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.offset}"


def reader_config(settings: KafkaSection, topic: str) -> dict[str, Any]:
    """What librdkafka is told of a reader, beside how to connect."""
    return {
        "group.id": f"{topic}.reader",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "earliest",
        "fetch.message.max.bytes": settings.max_message_bytes,
        # Not every broker wakes a waiting fetch when a record comes: then this is the latency.
        "fetch.wait.max.ms": 100,
        "fetch.error.backoff.ms": 100,
    }


class RecordReader:
    """Reads partitions of one topic from the beginning or from given positions.

    It never asks for "the end": not every Kafka-compatible broker says it right.
    """

    def __init__(self, connection: Connection, topic: str, positions: dict[int, int | None]) -> None:
        """
        Args:
            positions: partition to the next offset to read; None: from the beginning.
        """
        self._connection = connection
        self._topic = topic
        self._outage = Outage(connection.settings.patience_s)
        self._errors_before = connection.num_errors
        first = {partition: offset or 0 for partition, offset in positions.items()}
        self._sequence = OffsetSequence(first)
        self._consumer = Consumer(connection.client_config(**reader_config(connection.settings, topic)))
        self._consumer.assign(
            # Offset 0 saves a look-up of the beginning, half a second; where it has expired, auto.offset.reset helps.
            [TopicPartition(topic, partition, offset) for partition, offset in first.items()]
        )

    def read(self, timeout_s: float) -> list[Record]:
        """Waits up to `timeout_s` for records and returns those that are there, in their partitions' order, without
        holes.

        Raises:
            BrokerUnavailableError: the broker reported an error that does not heal by itself, or has been away for
                `kafka.patience_s`.
        """
        # consume() waits for a full batch or its whole timeout: wait for one record, then take what is there.
        first = self._consumer.consume(1, timeout_s)
        if not first:
            self._check_outage()
            return []
        self._outage.over()
        messages = first + self._consumer.consume(_BATCH, 0)
        records = [
            record
            for message in messages
            if (record := self._checked(message)) is not None
            and self._sequence.accepts(record.partition, record.offset)
        ]
        for partition, offset in self._sequence.take_seeks().items():
            logger.info("%s[%d]@%d was not shown: it is read again", self._topic, partition, offset)
            self._consumer.seek(TopicPartition(self._topic, partition, offset))
        return records

    def close(self) -> None:
        """Ends the reader."""
        self._consumer.close()

    def _check_outage(self) -> None:
        """Nothing was read: is that because the broker is away?"""
        if (errors := self._connection.num_errors) != self._errors_before:
            self._errors_before = errors
            self._outage.noticed(time.monotonic())
        if self._outage.exhausts_patience(self._broker_answers, time.monotonic()):
            raise BrokerUnavailableError(
                f"no broker answers for topic {self._topic} since {self._connection.settings.patience_s:g} s "
                f"(kafka.patience_s){self._connection.explain()}"
            )

    def _broker_answers(self) -> bool:
        try:
            self._consumer.list_topics(self._topic, timeout=_ANSWER_TIMEOUT_S)
        except KafkaException as error:
            logger.info("%s: the broker does not answer yet: %s", self._topic, error.args[0].str())
            return False
        return True

    def _checked(self, message: Message) -> Record | None:
        """The one place where a message's error is looked at."""
        error = message.error()
        if error is None:
            return Record(
                message.topic() or "",
                message.partition() or 0,
                message.offset() or 0,
                message.key(),
                message.value() or b"",
            )
        if error.code() == KafkaError._PARTITION_EOF:
            return None
        if error.retriable() or error.code() in TRANSIENT | _NOT_YET:
            logger.warning("%s: %s; reading goes on", message.topic(), error.str())
            return None
        raise BrokerUnavailableError(f"reading {message.topic()} failed: {error.str()}{self._connection.explain()}")


_NOT_YET = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION})
"""Of a topic that was made a moment ago."""


class ReaderThread:
    """Reads in a thread and hands each batch of records to a callback; an error ends it and goes to another."""

    def __init__(
        self,
        reader: RecordReader,
        on_records: Callable[[list[Record]], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._reader = reader
        self._on_records = on_records
        self._on_error = on_error
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kafka-reader", daemon=True)

    def start(self) -> "ReaderThread":
        self._thread.start()
        return self

    def close(self) -> None:
        """Ends the thread and the reader; waits for both."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                records = self._reader.read(timeout_s=0.5)
                if records:
                    self._on_records(records)
        except BaseException as error:  # whatever it was, a reader that ended in silence would be waited for
            if not self._closed.is_set():
                self._on_error(error)
        finally:
            self._reader.close()


def all_partitions(count: int) -> dict[int, int | None]:
    """Positions that read a whole topic from the beginning."""
    return dict.fromkeys(range(count))


def positions_after(records: Iterable[Record]) -> dict[int, int]:
    """The next offset to read in each partition, after these records."""
    positions: dict[int, int] = {}
    for record in records:
        positions[record.partition] = max(positions.get(record.partition, 0), record.offset + 1)
    return positions
