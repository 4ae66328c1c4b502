"""Fixtures that several packages' tests share."""

from collections.abc import Iterator

import hypothesis
import pytest

from streamrl.command.broker import EmbeddedBroker
from streamrl.settings import KafkaSection

# A busy machine makes a property slow, not false.
hypothesis.settings.register_profile("streamrl", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("streamrl")


@pytest.fixture(scope="session")
def kafka_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaSection]:
    """Settings of a real embedded broker. Tests share it: each uses a run id, and so topics, of its own."""
    with EmbeddedBroker.start(tmp_path_factory.mktemp("broker") / "broker.log") as broker:
        broker.wait_ready()
        yield broker.settings(KafkaSection())
