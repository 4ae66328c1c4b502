"""The broker of deploy/compose.yaml, started from what Compose gives its container: a real Apache Kafka."""

import re
import signal
from collections.abc import Iterator

import pytest

from streamrl import lifetime
from streamrl.command.apache_kafka import KafkaDownload
from streamrl.command.ports import free_port
from streamrl.command.setting_names import parse_value
from streamrl.errors import RefusedError
from streamrl.kafka.connection import Connection
from streamrl.kafka.topics import Topics, create_topics
from streamrl.settings import KafkaSection
from tests.deploy.test_compose import COMPOSE, SECRETS, SERVICES, filled

pytestmark = pytest.mark.kafka


def properties_of(environment: dict[str, str]) -> dict[str, str]:
    """As the image of Apache Kafka makes server.properties: KAFKA_LOG_DIRS becomes log.dirs."""
    return {
        name.removeprefix("KAFKA_").lower().replace("_", "."): value
        for name, value in environment.items()
        if name.startswith("KAFKA_")
    }


@pytest.fixture(scope="module")
def address(kafka_download: KafkaDownload, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    inner = free_port(taken={port})
    # The container has all ports to itself; here they are free ones, on loopback.
    places = {
        "CLIENT://:9092": f"CLIENT://127.0.0.1:{port}",
        "CLIENT://kafka:9092": f"CLIENT://127.0.0.1:{port}",
        "127.0.0.1:19092": f"127.0.0.1:{inner}",
        "127.0.0.1:9093": f"127.0.0.1:{port + 1}",
    }
    properties = {}
    for name, value in properties_of(SERVICES["kafka"]["environment"]).items():
        if name == "log.dirs":
            continue
        text = filled(value, SECRETS)
        for place, here in places.items():
            text = text.replace(place, here)
        properties[name] = re.sub(r"\s+", " ", text)
    folder = tmp_path_factory.mktemp("kafka")
    process = lifetime.spawn(
        kafka_download.command(folder / "data", port, properties),
        log=folder / "kafka.log",
        env=kafka_download.environment(folder / "data"),
        with_signal=signal.SIGKILL,
    )
    yield f"127.0.0.1:{port}"
    process.kill()
    process.wait()


def test_services_with_their_password_are_let_in_and_others_are_not(address):
    client = parse_value(filled(COMPOSE["x-environment"]["STREAMRL_KAFKA__CLIENT"], SECRETS))
    assert isinstance(client, dict)
    settings = KafkaSection(bootstrap_servers=address, client=client)
    connection = Connection(settings, client_id="test")
    connection.check(60.0)
    topics = Topics("compose")
    assert set(create_topics(connection, topics, 4)) >= {topics.prompts, topics.rollouts}

    stranger = settings.model_copy(update={"client": {**client, "sasl.password": "guessed"}})
    with pytest.raises(RefusedError, match="refuses us"):
        Connection(stranger, client_id="test").check(20.0)
