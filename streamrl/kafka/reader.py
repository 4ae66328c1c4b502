"""A reader of given partitions from given positions. No consumer group decides who reads what: we do."""

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from streamrl.errors import BrokerUnavailableError
from streamrl.kafka.connection import Connection
from streamrl.kafka.offset_sequence import OffsetSequence

logger = logging.getLogger(__name__)

_BATCH = 500


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
        first = {partition: offset or 0 for partition, offset in positions.items()}
        self._sequence = OffsetSequence(first)
        self._consumer = Consumer(
            connection.client_config(
                **{
                    "group.id": f"{topic}.reader",
                    "enable.auto.commit": False,
                    "enable.auto.offset.store": False,
                    "auto.offset.reset": "earliest",
                    "fetch.message.max.bytes": connection.settings.max_message_bytes,
                    # Not every broker wakes a waiting fetch when a record comes: then this is the latency.
                    "fetch.wait.max.ms": 100,
                    "fetch.error.backoff.ms": 100,
                }
            )
        )
        self._consumer.assign(
            # Offset 0 saves a look-up of the beginning, half a second; where it has expired, auto.offset.reset helps.
            [TopicPartition(topic, partition, offset) for partition, offset in first.items()]
        )

    def read(self, timeout_s: float) -> list[Record]:
        """Waits up to `timeout_s` for records and returns those that are there, in their partitions' order, without
        holes.

        Raises:
            BrokerUnavailableError: the broker reported an error that does not heal by itself.
        """
        # consume() waits for a full batch or its whole timeout: wait for one record, then take what is there.
        first = self._consumer.consume(1, timeout_s)
        if not first:
            return []
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
        if error.retriable() or error.code() in _HEALING:
            logger.warning("%s: %s; reading goes on", message.topic(), error.str())
            return None
        raise BrokerUnavailableError(f"reading {message.topic()} failed: {error.str()}{self._connection.explain()}")


_HEALING = frozenset(
    {
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TRANSPORT,
        KafkaError._RESOLVE,
        KafkaError._TIMED_OUT,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
    }
)


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
