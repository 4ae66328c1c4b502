"""An idempotent producer whose every delivery is checked."""

import logging
import threading
from types import TracebackType
from typing import Any

from confluent_kafka import KafkaError, Message, Producer

from streamrl.errors import BrokerUnavailableError, RecordError
from streamrl.kafka.connection import Connection
from streamrl.settings import KafkaSection

logger = logging.getLogger(__name__)

_RECORD_OVERHEAD_BYTES = 1024
_POLL_S = 1.0


def producer_config(settings: KafkaSection) -> dict[str, Any]:
    """What librdkafka is told of a producer, beside how to connect."""
    return {
        "enable.idempotence": True,
        "compression.type": settings.compression,
        "message.max.bytes": settings.max_message_bytes,
        "linger.ms": 2,
        "delivery.timeout.ms": int(settings.patience_s * 1000),
    }


class RecordProducer:
    """Sends records; a failed delivery is raised by the next call.

    Thread-safe. Delivery reports are served by a thread of its own, so that a caller that has nothing more to send
    still learns of failures.
    """

    def __init__(self, connection: Connection) -> None:
        settings = connection.settings
        self._connection = connection
        self._max_bytes = settings.max_message_bytes
        self._producer = Producer(connection.client_config(**producer_config(settings)))
        self._failure: KafkaError | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._serve_reports, name="kafka-delivery-reports", daemon=True).start()

    def send(self, topic: str, value: bytes, *, key: bytes | None = None, partition: int = -1) -> None:
        """Queues one record.

        Args:
            partition: -1: by the key.

        Raises:
            RecordError: the record is larger than `kafka.max_message_bytes`.
            BrokerUnavailableError: an earlier record could not be delivered.
        """
        self._raise_failure()
        size = len(value) + len(key or b"") + _RECORD_OVERHEAD_BYTES
        if size > self._max_bytes:
            raise RecordError(
                f"a record of {len(value)} bytes for {topic} is larger than kafka.max_message_bytes "
                f"({self._max_bytes}) allows: raise that setting, or lower generator.max_tokens"
            )
        while True:
            try:
                self._producer.produce(topic, value=value, key=key, partition=partition, on_delivery=self._on_delivery)
                return
            except BufferError:
                # The local queue is full: wait until the broker has taken some.
                self._producer.poll(0.1)
                self._raise_failure()

    def flush(self, timeout_s: float) -> None:
        """Waits until all that was sent is delivered.

        Raises:
            BrokerUnavailableError: not within `timeout_s`, or a delivery failed.
        """
        remaining = self._producer.flush(timeout_s)
        self._raise_failure()
        if remaining:
            raise BrokerUnavailableError(
                f"{remaining} records were not delivered within {timeout_s:g} s{self._connection.explain()}"
            )

    def close(self, timeout_s: float = 10.0) -> None:
        """Flushes and ends. Raises as `flush`."""
        try:
            self.flush(timeout_s)
        finally:
            # Its thread ends by itself, within a poll.
            self._closed.set()

    def __enter__(self) -> "RecordProducer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._closed.set()

    def _serve_reports(self) -> None:
        while not self._closed.is_set():
            self._producer.poll(_POLL_S)

    def _on_delivery(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            logger.error("a record for %s was not delivered: %s", message.topic(), error.str())
            self._failure = error

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise BrokerUnavailableError(
                f"a record could not be delivered: {self._failure.str()}{self._connection.explain()}"
            )
