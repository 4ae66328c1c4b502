"""Fixtures that several packages' tests share."""

from collections.abc import Iterator

import pytest

from streamrl.command.broker import EmbeddedBroker
from streamrl.settings import KafkaSection


@pytest.fixture(scope="session")
def kafka_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaSection]:
    """Settings of a real embedded broker. Tests share it: each uses a run id, and so topics, of its own."""
    with EmbeddedBroker.start(tmp_path_factory.mktemp("broker") / "broker.log") as broker:
        broker.wait_ready()
        yield broker.settings(KafkaSection())
