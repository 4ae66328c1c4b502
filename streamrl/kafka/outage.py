"""What of a broker's answers heals by itself, and when a reader must conclude that the broker will not come back.

librdkafka connects again by itself, for ever and mostly in silence: that nothing is read may also mean that nothing is
written. So a reader that heard of a broken connection asks the broker now and then until it answers.
"""

from collections.abc import Callable

from confluent_kafka import KafkaError

TRANSIENT = frozenset(
    {
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._TRANSPORT,
        KafkaError._RESOLVE,
        KafkaError._TIMED_OUT,
        KafkaError._TIMED_OUT_QUEUE,
        KafkaError._WAIT_COORD,
        KafkaError.BROKER_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.KAFKA_STORAGE_ERROR,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NETWORK_EXCEPTION,
        KafkaError.NOT_CONTROLLER,
        KafkaError.NOT_COORDINATOR,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.STALE_CTRL_EPOCH,
    }
)
"""Codes of a broker that is away, starts, or hands its partitions to another."""

_ASK_EVERY_S = 5.0


class Outage:
    """Whether the broker answers, as far as one reader knows. Time is an argument."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since_s: float | None = None
        self._ask_at_s = 0.0

    def noticed(self, now_s: float) -> None:
        """A connection broke, or could not be made."""
        if self._since_s is None:
            self._since_s, self._ask_at_s = now_s, now_s + _ASK_EVERY_S

    def over(self) -> None:
        """The broker has answered."""
        self._since_s = None

    def exhausts_patience(self, answers: Callable[[], bool], now_s: float) -> bool:
        """Whether the broker has been away for too long.

        Args:
            answers: asks it; called seldom, and only during an outage.
        """
        if self._since_s is None or now_s < min(self._ask_at_s, self._since_s + self._patience_s):
            return False
        self._ask_at_s = now_s + _ASK_EVERY_S
        if answers():
            self.over()
            return False
        return now_s - self._since_s >= self._patience_s
