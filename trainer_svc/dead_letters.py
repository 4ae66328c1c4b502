"""Topic `dead-letters`: rollouts that the trainer could not handle, with the reason."""

import threading

from streamrl.errors import RecordError
from streamrl.kafka.producer import RecordProducer
from streamrl.kafka.reader import Record
from streamrl.v1.records_pb2 import DeadLetter


class DeadLetters:
    """Sends and counts them."""

    def __init__(self, producer: RecordProducer, topic: str, *, attempt: int) -> None:
        self._producer = producer
        self._topic = topic
        self._attempt = attempt
        self._lock = threading.Lock()
        self._count = 0

    @property
    def count(self) -> int:
        with self._lock:
            return self._count

    def send(self, record: Record, reason: str) -> None:
        """Puts one record aside; of one that is too large with its envelope, only its place and the reason."""
        with self._lock:
            self._count += 1
        letter = DeadLetter(
            attempt=self._attempt,
            service="trainer_svc",
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            reason=reason,
            value=record.value,
        )
        try:
            self._producer.send(self._topic, letter.SerializeToString())
        except RecordError:
            letter.ClearField("value")
            self._producer.send(self._topic, letter.SerializeToString())
