"""Where a topic begins and ends, which topic it is, and which saved positions are positions in it.

An offset means something only in the very topic that it was taken from: a topic of the same name that was made anew, in
another cluster perhaps, has another id.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from confluent_kafka import KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from streamrl.errors import BrokerUnavailableError
from streamrl.kafka.connection import Connection

logger = logging.getLogger(__name__)

_CALL_S = 10.0
_RETRY_S = 0.2
_NO_ID = "AAAAAAAAAAAAAAAAAAAAAA"
"""What a broker without topic ids gives: all zeros."""

_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class TopicExtent:
    """A topic at one moment."""

    topic_id: str
    """Empty: the broker has no topic ids."""
    first: Mapping[int, int]
    """Partition to its first offset that is still there."""
    end: Mapping[int, int]
    """Partition to the offset that its next record gets, as the broker says: some say less."""


def topic_extent(connection: Connection, topic: str, num_partitions: int, timeout_s: float) -> TopicExtent:
    """Asks the broker.

    Raises:
        BrokerUnavailableError: no answer within `timeout_s`.
    """
    admin = AdminClient(connection.client_config())
    deadline = time.monotonic() + timeout_s

    def describe() -> str:
        futures = admin.describe_topics(TopicCollection([topic]), request_timeout=_CALL_S)
        topic_id = str(futures[topic].result().topic_id)
        return "" if topic_id == _NO_ID else topic_id

    def patiently(ask: Callable[[], _Answer]) -> _Answer:
        while True:
            try:
                return ask()
            except KafkaException as error:
                # A topic that was made a moment ago may not have a leader yet.
                if time.monotonic() > deadline:
                    raise BrokerUnavailableError(
                        f"the broker does not say how far topic {topic} goes: {error.args[0].str()}"
                        f"{connection.explain()}"
                    ) from error
                logger.debug("%s: %s; asking again", topic, error.args[0].str())
            time.sleep(_RETRY_S)

    return TopicExtent(
        topic_id=patiently(describe),
        first=patiently(lambda: first_offsets(admin, topic, num_partitions, _CALL_S)),
        end=patiently(lambda: end_offsets(admin, topic, num_partitions, _CALL_S)),
    )


def first_offsets(admin: AdminClient, topic: str, num_partitions: int, timeout_s: float) -> dict[int, int]:
    """Partition to the first offset that is still there. Raises KafkaException."""
    return _offsets(admin, topic, num_partitions, OffsetSpec.earliest(), timeout_s)  # type: ignore[no-untyped-call]


def end_offsets(admin: AdminClient, topic: str, num_partitions: int, timeout_s: float) -> dict[int, int]:
    """Partition to the offset of its next record, as the broker says. Raises KafkaException."""
    return _offsets(admin, topic, num_partitions, OffsetSpec.latest(), timeout_s)  # type: ignore[no-untyped-call]


def _offsets(admin: AdminClient, topic: str, num_partitions: int, spec: OffsetSpec, timeout_s: float) -> dict[int, int]:
    places = [TopicPartition(topic, partition) for partition in range(num_partitions)]
    futures = admin.list_offsets(dict.fromkeys(places, spec), request_timeout=timeout_s)
    return {place.partition: int(future.result().offset) for place, future in futures.items()}


def usable_positions(extent: TopicExtent, topic_id: str, saved: Mapping[int, int]) -> dict[int, int | None]:
    """Where to read from in each partition: a saved position, or the beginning (None) where there is no valid one.

    Reading too much is harmless. A position is void when it comes from another topic, or lies outside what the topic
    holds: before it the records have expired, behind it they were lost.

    Args:
        topic_id: of the topic that the positions were taken from.
    """
    same_topic = bool(topic_id) and topic_id == extent.topic_id
    return {
        partition: saved[partition]
        if same_topic and partition in saved and extent.first[partition] <= saved[partition] <= end
        else None
        for partition, end in extent.end.items()
    }
