"""Everything an instance writes to Kafka about samples: rollouts and dead letters."""

import logging

from streamrl.errors import RecordError
from streamrl.identity import SampleKey, group_key
from streamrl.kafka.dead_letters import DeadLetters
from streamrl.kafka.producer import RecordProducer
from streamrl.kafka.reader import Record
from streamrl.kafka.topics import Topics
from streamrl.v1.records_pb2 import ROLLOUT_STATUS_FAILED, Rollout

logger = logging.getLogger(__name__)


class Outbox:
    """Writes in the name of one instance, whose incarnation may change."""

    def __init__(self, producer: RecordProducer, topics: Topics, *, attempt: int, instance: str) -> None:
        self._producer = producer
        self._topics = topics
        self._attempt = attempt
        self._instance = instance
        self._dead_letters = DeadLetters(producer, topics.dead_letters, service="generator_svc", attempt=attempt)
        self._earlier_dead_letters = 0
        self.incarnation = 0

    @property
    def dead_letters(self) -> int:
        """Written since the incarnation began."""
        return self._dead_letters.count - self._earlier_dead_letters

    def begin(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self._earlier_dead_letters = self._dead_letters.count

    def send(self, rollout: Rollout) -> None:
        """Sends a rollout, whatever its size: one that no record can hold goes as a failed one.

        Args:
            rollout: without attempt, instance and incarnation.

        Raises:
            BrokerUnavailableError: an earlier record could not be delivered.
        """
        rollout.attempt, rollout.instance, rollout.incarnation = self._attempt, self._instance, self.incarnation
        key = SampleKey.from_proto(rollout.id)
        try:
            self._producer.send(self._topics.rollouts, rollout.SerializeToString(), key=group_key(key))
        except RecordError as error:
            logger.warning("sample %s: %s", key, error)
            failed = Rollout(status=ROLLOUT_STATUS_FAILED, error=str(error))
            for field in ("attempt", "instance", "incarnation", "dispatch"):
                setattr(failed, field, getattr(rollout, field))
            failed.id.CopyFrom(rollout.id)
            failed.timings.CopyFrom(rollout.timings)
            self._producer.send(self._topics.rollouts, failed.SerializeToString(), key=group_key(key))

    def give_up(self, record: Record, reason: str) -> None:
        """Puts a record that cannot be handled aside."""
        self._dead_letters.send(record, reason)

    def flush(self, timeout_s: float) -> None:
        """Waits until all is delivered; blocks. Raises as `RecordProducer.flush`."""
        self._producer.flush(timeout_s)
