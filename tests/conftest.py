"""Fixtures that several packages' tests share."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from streamrl import lifetime
from streamrl.command.broker import EmbeddedBroker
from streamrl.command.ports import free_port
from streamrl.kafka.connection import Connection
from streamrl.settings import KafkaSection

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
    with EmbeddedBroker.start(tmp_path_factory.mktemp("broker") / "broker.log") as broker:
        broker.wait_ready()
        yield broker.settings(KafkaSection())


@pytest.fixture(scope="session")
def apache_kafka_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaSection]:
    """Settings of an Apache Kafka: the one at KAFKA_BOOTSTRAP_SERVERS, or a node that KAFKA_HOME's `broker` starts."""
    if servers := os.environ.get("KAFKA_BOOTSTRAP_SERVERS"):
        yield KafkaSection(bootstrap_servers=servers)
        return
    broker = Path(os.environ.get("KAFKA_HOME") or "/nowhere") / "broker"
    if not broker.is_file():
        pytest.skip(
            "no Apache Kafka here: set KAFKA_BOOTSTRAP_SERVERS, or KAFKA_HOME to a folder with a `broker` command"
        )
    folder, port = tmp_path_factory.mktemp("apache-kafka"), free_port()
    node = lifetime.spawn(
        [str(broker), "--dir", str(folder / "data"), "--port", str(port)],
        log=folder / "broker.log",
        with_signal=signal.SIGKILL,
    )
    settings = KafkaSection(bootstrap_servers=f"127.0.0.1:{port}")
    try:
        Connection(settings, "test").check(timeout_s=60)
        yield settings
    finally:
        node.kill()
        node.wait()
