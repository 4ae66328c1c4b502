"""Which saved positions count, on both brokers."""

import uuid

import pytest
from confluent_kafka.admin import AdminClient

from streamrl.kafka.connection import Connection
from streamrl.kafka.positions import TopicExtent, topic_extent, usable_positions
from streamrl.kafka.producer import RecordProducer
from streamrl.kafka.topics import Topics, create_topics
from streamrl.settings import KafkaSection


def test_a_position_counts_in_its_own_topic_and_inside_of_what_it_holds() -> None:
    extent = TopicExtent("this", first={0: 10, 1: 0, 2: 0, 3: 0}, end={0: 20, 1: 5, 2: 5, 3: 5})
    saved = {0: 4, 1: 5, 2: 6}
    assert usable_positions(extent, "this", saved) == {0: None, 1: 5, 2: None, 3: None}
    for other in ("another", ""):
        assert usable_positions(extent, other, saved) == dict.fromkeys(range(4))
    unknown = TopicExtent("", extent.first, extent.end)
    assert usable_positions(unknown, "", saved) == dict.fromkeys(range(4))


@pytest.mark.parametrize(
    "broker", ["embedded_kafka_settings", pytest.param("apache_kafka_settings", marks=pytest.mark.kafka)]
)
def test_a_topic_that_is_made_anew_is_another_one(broker: str, request: pytest.FixtureRequest) -> None:
    settings: KafkaSection = request.getfixturevalue(broker)
    connection, topics = Connection(settings, "test"), Topics(f"positions-{uuid.uuid4().hex[:8]}")
    create_topics(connection, topics, max_instances=1)
    partitions = settings.rollout_partitions
    empty = topic_extent(connection, topics.rollouts, partitions, timeout_s=30)
    assert empty.topic_id
    assert set(empty.end.values()) == {0}
    with RecordProducer(connection) as producer:
        producer.send(topics.rollouts, b"x", partition=1)
        producer.flush(30)
    filled = topic_extent(connection, topics.rollouts, partitions, timeout_s=30)
    assert (filled.topic_id, filled.first[1], filled.end[1]) == (empty.topic_id, 0, 1)
    assert usable_positions(filled, filled.topic_id, {1: 1}) == {0: None, 1: 1, 2: None, 3: None}

    admin = AdminClient(connection.client_config())
    admin.delete_topics([topics.rollouts])[topics.rollouts].result()
    again = _made_again(connection, topics, filled.topic_id, partitions)
    assert again.topic_id != filled.topic_id
    assert usable_positions(again, filled.topic_id, {1: 1}) == dict.fromkeys(range(partitions))


def _made_again(connection: Connection, topics: Topics, old_id: str, partitions: int) -> TopicExtent:
    """A deletion takes its time: until it is through, the old topic is found."""
    for _ in range(100):
        create_topics(connection, topics, max_instances=1)
        extent = topic_extent(connection, topics.rollouts, partitions, timeout_s=30)
        if extent.topic_id != old_id:
            return extent
    raise AssertionError("the topic is not deleted")
