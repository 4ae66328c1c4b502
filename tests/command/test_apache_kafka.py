"""Apache Kafka from a download: found or asked for in plain words, and its topics outlive its process."""

from pathlib import Path

import pytest

from streamrl.command.apache_kafka import KafkaDownload, find_java
from streamrl.command.broker import EmbeddedBroker
from streamrl.kafka.connection import Connection
from streamrl.kafka.producer import RecordProducer
from streamrl.kafka.reader import RecordReader
from streamrl.kafka.topics import Topics, create_topics
from streamrl.settings import KafkaSection

TOPICS = Topics("durable")


def write(broker: EmbeddedBroker, value: bytes) -> None:
    connection = Connection(broker.settings(KafkaSection()), "test")
    create_topics(connection, TOPICS, max_instances=1)
    with RecordProducer(connection) as producer:
        producer.send(TOPICS.prompts, value)


def read(broker: EmbeddedBroker) -> list[bytes]:
    reader = RecordReader(Connection(broker.settings(KafkaSection()), "test"), TOPICS.prompts, {0: None})
    records = reader.read(20)
    reader.close()
    return [record.value for record in records]


@pytest.fixture
def release(kafka_download: KafkaDownload, tmp_path: Path) -> Path:
    """A folder laid out as an unpacked release, whose scripts become the Java process as a release's do."""
    home = tmp_path / "kafka_2.13-4.3.1"
    (home / "bin").mkdir(parents=True)
    (home / "libs").symlink_to(kafka_download.home / "libs")
    for name, main_class in (("kafka-server-start", "kafka.Kafka"), ("kafka-storage", "kafka.tools.StorageTool")):
        script = home / "bin" / f"{name}.sh"
        script.write_text(
            "#!/bin/sh\n"
            'libs=$(dirname "$0")/../libs\n'
            f'exec java $KAFKA_HEAP_OPTS -XX:TieredStopAtLevel=1 -cp "$libs/*" {main_class} "$@"\n'
        )
        script.chmod(0o755)
    return home


@pytest.mark.kafka
@pytest.mark.slow
def test_the_node_that_follows_a_killed_one_finds_its_topics_whatever_its_port(release: Path, tmp_path: Path) -> None:
    settings, data, log = KafkaSection(embedded="apache", home=str(release)), tmp_path / "kafka", tmp_path / "log"
    with EmbeddedBroker.start(settings, data=data, log=log) as first:
        first.wait_ready()
        assert first.is_durable
        write(first, b"kept")
        first.process.kill()
        first.process.wait()
    with EmbeddedBroker.start(settings, data=data, log=log) as second:
        second.wait_ready()
        assert read(second) == [b"kept"]


def test_a_missing_download_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KAFKA_HOME", raising=False)
    with pytest.raises(ValueError, match=r"neither kafka.home nor KAFKA_HOME.*kafka.apache.org/downloads"):
        KafkaDownload.find("")
    with pytest.raises(ValueError, match=r"kafka.home is .*where no Apache Kafka is.*kafka-server-start.sh"):
        KafkaDownload.find(str(tmp_path))
    monkeypatch.setenv("KAFKA_HOME", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"KAFKA_HOME is .*nowhere"):
        KafkaDownload.find("")


def test_a_missing_java_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"needs Java, and there is no `java` in PATH"):
        find_java()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ValueError, match=r"JAVA_HOME"):
        find_java()
