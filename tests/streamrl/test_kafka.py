"""The Kafka layer against real brokers: the same contract on the embedded one and on Apache Kafka."""

import socket
import threading
import time
import uuid

import pytest
from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from streamrl.errors import BrokerUnavailableError, RecordError, RefusedError
from streamrl.kafka.connection import Connection
from streamrl.kafka.producer import RecordProducer
from streamrl.kafka.reader import ReaderThread, Record, RecordReader, all_partitions, positions_after
from streamrl.kafka.topics import Topics, create_topics
from streamrl.settings import KafkaSection


@pytest.fixture(params=["embedded_kafka_settings", pytest.param("apache_kafka_settings", marks=pytest.mark.kafka)])
def kafka_settings(request: pytest.FixtureRequest) -> KafkaSection:
    """Each broker in turn."""
    settings: KafkaSection = request.getfixturevalue(request.param)
    return settings


@pytest.fixture
def connection(kafka_settings: KafkaSection) -> Connection:
    return Connection(kafka_settings, "test")


@pytest.fixture
def topics(connection: Connection) -> Topics:
    topics = Topics(f"test-{uuid.uuid4().hex[:8]}")
    create_topics(connection, topics, max_instances=3)
    return topics


def read_until(reader: RecordReader, count: int) -> list[Record]:
    """Reads until `count` records are there, at most 20 rounds."""
    records: list[Record] = []
    for _ in range(20):
        records += reader.read(1.0)
        if len(records) >= count:
            break
    return records


def test_topics_may_be_created_by_several_services_at_once(connection: Connection, topics: Topics) -> None:
    create_topics(connection, topics, max_instances=3)


def test_a_topic_with_partitions_that_nobody_would_read_is_refused(connection: Connection, topics: Topics) -> None:
    fewer = connection.settings.model_copy(update={"rollout_partitions": connection.settings.rollout_partitions - 1})
    with pytest.raises(RefusedError, match=rf"{topics.rollouts} has 4 partitions, expected 3.*rollout_partitions"):
        create_topics(Connection(fewer, "test"), topics, max_instances=3)
    # Room for more instances than there may be does no harm.
    assert create_topics(connection, topics, max_instances=2) == []
    with pytest.raises(RefusedError, match=rf"{topics.assignments} has 3 partitions, expected 4"):
        create_topics(connection, topics, max_instances=4)


def test_records_come_back_whole_and_in_the_order_of_their_partition(connection: Connection, topics: Topics) -> None:
    sent = [(index % 3, f"value {index}".encode()) for index in range(3000)]
    with RecordProducer(connection) as producer:
        for partition, value in sent:
            producer.send(topics.assignments, value, partition=partition)
    reader = RecordReader(connection, topics.assignments, all_partitions(3))
    records = read_until(reader, len(sent))
    reader.close()
    for partition in range(3):
        assert [r.value for r in records if r.partition == partition] == [v for p, v in sent if p == partition]


def test_a_reader_sees_only_the_partitions_that_it_was_given(connection: Connection, topics: Topics) -> None:
    with RecordProducer(connection) as producer:
        for partition in range(3):
            producer.send(topics.assignments, f"for {partition}".encode(), partition=partition)
    reader = RecordReader(connection, topics.assignments, {1: None})
    assert [record.value for record in read_until(reader, 1) + reader.read(0.5)] == [b"for 1"]
    reader.close()


def test_a_reader_goes_on_after_the_positions_of_another(connection: Connection, topics: Topics) -> None:
    with RecordProducer(connection) as producer:
        for index in range(10):
            producer.send(topics.prompts, str(index).encode())
    first = RecordReader(connection, topics.prompts, {0: None})
    seen = read_until(first, 10)[:4]
    first.close()
    second = RecordReader(connection, topics.prompts, dict(positions_after(seen)))
    assert [int(record.value) for record in read_until(second, 6)] == [4, 5, 6, 7, 8, 9]
    second.close()


def test_a_reader_goes_on_with_what_is_left_when_its_position_has_expired(
    connection: Connection, topics: Topics
) -> None:
    with RecordProducer(connection) as producer:
        for index in range(10):
            producer.send(topics.prompts, str(index).encode())
    admin = AdminClient(connection.client_config())
    (expired,) = admin.delete_records([TopicPartition(topics.prompts, 0, 6)]).values()
    try:
        expired.result()
    except KafkaException as error:
        pytest.skip(f"this broker deletes no records on request: {error.args[0].str()}")
    reader = RecordReader(connection, topics.prompts, {0: 2})
    assert [int(record.value) for record in read_until(reader, 4)] == [6, 7, 8, 9]
    reader.close()


def test_a_reader_is_there_before_its_topic(connection: Connection) -> None:
    late = Topics(f"late-{uuid.uuid4().hex[:8]}")
    reader = RecordReader(connection, late.prompts, {0: None})
    assert reader.read(1.0) == []
    create_topics(connection, late, max_instances=1)
    with RecordProducer(connection) as producer:
        producer.send(late.prompts, b"first")
    assert [record.value for record in read_until(reader, 1)] == [b"first"]
    reader.close()


def test_records_of_several_producers_at_once_are_all_read(connection: Connection, topics: Topics) -> None:
    def send(writer: int) -> None:
        with RecordProducer(connection) as producer:
            for index in range(200):
                producer.send(topics.rollouts, f"{writer}/{index}".encode(), key=f"{index % 7}".encode())

    reader = RecordReader(connection, topics.rollouts, all_partitions(connection.settings.rollout_partitions))
    writers = [threading.Thread(target=send, args=(writer,)) for writer in range(3)]
    for thread in writers:
        thread.start()
    records = read_until(reader, 600)
    for thread in writers:
        thread.join()
    reader.close()
    assert sorted(record.value for record in records) == sorted(
        f"{writer}/{index}".encode() for writer in range(3) for index in range(200)
    )


def test_samples_of_a_key_stay_in_one_partition(connection: Connection, topics: Topics) -> None:
    with RecordProducer(connection) as producer:
        for index in range(40):
            producer.send(topics.rollouts, b"x", key=f"group {index % 4}".encode())
    reader = RecordReader(connection, topics.rollouts, all_partitions(connection.settings.rollout_partitions))
    records = read_until(reader, 40)
    reader.close()
    for key in {record.key for record in records}:
        assert len({record.partition for record in records if record.key == key}) == 1


def test_the_largest_legal_record_fits_and_a_larger_one_is_refused_with_its_size(
    connection: Connection, topics: Topics
) -> None:
    largest = connection.settings.max_message_bytes - 1024
    with RecordProducer(connection) as producer:
        producer.send(topics.rollouts, bytes(largest))
        with pytest.raises(RecordError, match=rf"{largest + 1} bytes.*kafka.max_message_bytes"):
            producer.send(topics.rollouts, bytes(largest + 1))
    reader = RecordReader(connection, topics.rollouts, all_partitions(connection.settings.rollout_partitions))
    assert [len(record.value) for record in read_until(reader, 1)] == [largest]
    reader.close()


def test_a_reader_thread_hands_over_what_comes_and_ends_when_told(connection: Connection, topics: Topics) -> None:
    arrived = threading.Event()
    values: list[bytes] = []
    errors: list[BaseException] = []

    def keep(records: list[Record]) -> None:
        values.extend(record.value for record in records)
        if len(values) == 2:
            arrived.set()

    thread = ReaderThread(RecordReader(connection, topics.prompts, {0: None}), keep, errors.append).start()
    with RecordProducer(connection) as producer:
        producer.send(topics.prompts, b"one")
        producer.send(topics.prompts, b"two")
    assert arrived.wait(20)
    thread.close()
    assert (values, errors) == ([b"one", b"two"], [])


@pytest.fixture
def nobody(kafka_settings: KafkaSection) -> KafkaSection:
    """An address at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    return kafka_settings.model_copy(update={"bootstrap_servers": f"127.0.0.1:{port}", "patience_s": 1.0})


def test_an_unreachable_broker_is_named_with_what_to_do(nobody: KafkaSection) -> None:
    with pytest.raises(BrokerUnavailableError, match=rf"{nobody.bootstrap_servers}.*kafka.bootstrap_servers"):
        Connection(nobody, "test").check(timeout_s=2)


def test_an_error_that_comes_again_and_again_is_logged_once(
    nobody: KafkaSection, caplog: pytest.LogCaptureFixture
) -> None:
    connection = Connection(nobody, "test")
    with pytest.raises(BrokerUnavailableError):
        connection.check(timeout_s=2)
    assert connection.num_errors > 5
    assert sum("Connection refused" in record.getMessage() for record in caplog.records if record.levelno > 20) == 1


def test_a_reader_gives_a_broker_up_that_stays_away(nobody: KafkaSection) -> None:
    reader = RecordReader(Connection(nobody, "test"), "streamrl.test.rollouts", {0: None})
    deadline = time.monotonic() + 20
    with pytest.raises(BrokerUnavailableError, match=r"no broker answers .*kafka\.patience_s"):
        while time.monotonic() < deadline:
            reader.read(timeout_s=0.2)
    reader.close()


def test_topics_are_asked_for_until_patience_is_over(nobody: KafkaSection) -> None:
    with pytest.raises(BrokerUnavailableError, match="could not be created"):
        create_topics(Connection(nobody, "test"), Topics("test"), max_instances=1)


def test_a_record_that_cannot_be_delivered_is_never_lost_in_silence(nobody: KafkaSection) -> None:
    producer = RecordProducer(Connection(nobody, "test"))
    producer.send("streamrl.test.rollouts", b"x")
    with pytest.raises(BrokerUnavailableError):
        producer.close(timeout_s=5)


def test_the_users_own_librdkafka_settings_pass_through(kafka_settings: KafkaSection) -> None:
    settings = kafka_settings.model_copy(
        update={"client": {"security.protocol": "SASL_SSL", "sasl.password": "secret"}}
    )
    config = Connection(settings, "test").client_config()
    assert (config["security.protocol"], config["sasl.password"]) == ("SASL_SSL", "secret")
