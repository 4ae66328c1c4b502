"""The topics of a run, made, listed and deleted by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from streamrl.command.main import run_command
from streamrl.kafka.connection import Connection
from streamrl.kafka.producer import RecordProducer
from streamrl.kafka.topic_states import refuse_used_topics
from streamrl.kafka.topics import Topics
from streamrl.settings import KafkaSection

pytestmark = pytest.mark.kafka


@pytest.fixture
def topics(apache_kafka_settings: KafkaSection, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `streamrl topics ACTION CONFIG --json …` for a run with a generation site, both on one broker."""
    config = tmp_path / "job.toml"
    config.write_text(
        '[run]\nid = "by-hand"\n'
        "[scheduler]\nmax_instances = 5\n"
        f'[kafka]\nbootstrap_servers = "{apache_kafka_settings.bootstrap_servers}"\n'
        f'[sites.west]\nkafka = {{ bootstrap_servers = "{apache_kafka_settings.bootstrap_servers}" }}\n'
    )

    def call(action: str, *arguments: str) -> Any:
        assert run_command(["topics", action, str(config), "--json", *arguments]) == 0
        return json.loads(capsys.readouterr().out)

    return call


def test_topics_are_made_listed_and_deleted(topics: Any, apache_kafka_settings: KafkaSection) -> None:
    names = Topics("by-hand")
    assert set(topics("create")["created"]) == set(names.all)
    assert topics("create")["created"] == []
    with RecordProducer(Connection(apache_kafka_settings, "test")) as producer:
        for partition in range(3):
            producer.send(names.assignments, b"x", partition=partition)
    listed = {state["topic"]: state for state in topics("list")["topics"]}
    assert listed.keys() == set(names.all)
    assert listed[names.assignments] == {"topic": names.assignments, "partitions": 5, "replicas": 1, "records": 3}
    assert set(topics("delete")["deleted"]) == set(names.all)
    assert topics("delete")["deleted"] == []
    assert topics("list")["topics"] == []


def test_a_generation_site_has_no_prompts(topics: Any) -> None:
    assert Topics("by-hand").prompts not in topics("create", "--site", "west")["created"]
    assert len(topics("delete", "--site", "west")["deleted"]) == 4


def test_a_new_run_does_not_use_what_an_earlier_one_of_its_name_has_left(
    topics: Any, apache_kafka_settings: KafkaSection
) -> None:
    connection, names = Connection(apache_kafka_settings, "test"), Topics("by-hand")
    topics("create")
    with RecordProducer(connection) as producer:
        # Instances may be up before the trainer.
        producer.send(names.spans, b"x", partition=0)
    refuse_used_topics(connection, "by-hand")
    with RecordProducer(connection) as producer:
        producer.send(names.prompts, b"x", partition=0)
    with pytest.raises(ValueError, match=r"by-hand\.prompts with 1 records.*streamrl topics delete"):
        refuse_used_topics(connection, "by-hand")
    topics("delete")
    refuse_used_topics(connection, "by-hand")
