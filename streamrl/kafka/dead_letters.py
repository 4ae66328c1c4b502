"""Topic `dead-letters`: records that a service could not handle, with the reason."""

import logging
import threading

from streamrl.errors import RecordError
from streamrl.kafka.producer import RecordProducer
from streamrl.kafka.reader import Record
from streamrl.v1.records_pb2 import DeadLetter

logger = logging.getLogger(__name__)


class DeadLetters:
    """Sends and counts those of one service. Thread-safe."""

    def __init__(self, producer: RecordProducer, topic: str, *, service: str, attempt: int) -> None:
        self._producer = producer
        self._topic = topic
        self._service = service
        self._attempt = attempt
        self._lock = threading.Lock()
        self._count = 0

    @property
    def count(self) -> int:
        """Sent so far."""
        with self._lock:
            return self._count

    def send(self, record: Record, reason: str) -> None:
        """Puts one record aside; of one that is too large with its envelope, only its place and the reason."""
        logger.warning("%s goes to dead-letters: %s", record, reason)
        with self._lock:
            self._count += 1
        letter = DeadLetter(
            attempt=self._attempt,
            service=self._service,
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            reason=reason,
            value=record.value,
        )
        try:
            self._producer.send(self._topic, letter.SerializeToString())
        except RecordError:
            # The largest legal record does not fit into another one.
            letter.ClearField("value")
            self._producer.send(self._topic, letter.SerializeToString())
