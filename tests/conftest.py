"""Fixtures that several packages' tests share."""

import os
import signal
from collections.abc import Iterator

import hypothesis
import pytest

from streamrl.command.apache_kafka import KafkaDownload
from streamrl.command.broker import EmbeddedBroker
from streamrl.settings import KafkaSection

# Under nohup the processes that tests start would inherit a SIGHUP that is ignored, and mean it.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A busy machine makes a property slow, not false.
hypothesis.settings.register_profile("streamrl", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("streamrl")


@pytest.fixture(scope="session")
def kafka_settings(embedded_kafka_settings: KafkaSection) -> KafkaSection:
    """Settings of a real broker."""
    return embedded_kafka_settings


@pytest.fixture(scope="session")
def embedded_kafka_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaSection]:
    """Settings of a real embedded broker. Tests share it: each uses a run id, and so topics, of its own."""
    folder = tmp_path_factory.mktemp("broker")
    with EmbeddedBroker.start(KafkaSection(), data=folder, log=folder / "broker.log") as broker:
        broker.wait_ready()
        yield broker.settings(KafkaSection())


@pytest.fixture(scope="session")
def kafka_download() -> KafkaDownload:
    """The Apache Kafka that KAFKA_HOME names."""
    try:
        return KafkaDownload.find("")
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def apache_kafka_settings(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KafkaSection]:
    """Settings of an Apache Kafka: the one at KAFKA_BOOTSTRAP_SERVERS, or a node of the one that KAFKA_HOME names."""
    if servers := os.environ.get("KAFKA_BOOTSTRAP_SERVERS"):
        yield KafkaSection(bootstrap_servers=servers)
        return
    request.getfixturevalue("kafka_download")
    folder, settings = tmp_path_factory.mktemp("apache-kafka"), KafkaSection(embedded="apache")
    with EmbeddedBroker.start(settings, data=folder / "kafka", log=folder / "broker.log") as broker:
        broker.wait_ready()
        yield broker.settings(settings)
