"""The embedded broker: ready when it says so, gone when it must be."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from streamrl import lifetime
from streamrl.command.broker import EmbeddedBroker
from streamrl.errors import BrokerUnavailableError
from streamrl.kafka.connection import Connection
from streamrl.settings import KafkaSection


def test_a_started_broker_answers_metadata_requests(kafka_settings: KafkaSection) -> None:
    metadata = AdminClient(Connection(kafka_settings, "test").client_config()).list_topics(timeout=5)
    assert len(metadata.brokers) == 1


def test_a_stopped_broker_is_gone_and_its_port_free(tmp_path: Path) -> None:
    with EmbeddedBroker.start(tmp_path / "broker.log") as broker:
        broker.wait_ready()
    assert broker.process.returncode is not None
    with pytest.raises(BrokerUnavailableError, match="no Kafka broker answers"):
        Connection(broker.settings(KafkaSection()), "test").check(0.5)


def test_a_broker_that_ends_while_it_starts_says_why(tmp_path: Path) -> None:
    log = tmp_path / "broker.log"
    process = lifetime.spawn(["sh", "-c", "echo no memory left >&2; exit 3"], log=log)
    with pytest.raises(BrokerUnavailableError, match=r"ended with code 3[\s\S]*no memory left"):
        EmbeddedBroker(process, "127.0.0.1:1", log).wait_ready()


def test_a_broker_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from streamrl.command.broker import EmbeddedBroker\n"
        "broker = EmbeddedBroker.start(Path(sys.argv[1])); print(broker.process.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "broker.log")], stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        broker_fd = os.pidfd_open(int(starter.stdout.readline()))
        starter.send_signal(signal.SIGKILL)
    try:
        assert lifetime.wait_ended(broker_fd, timeout_s=10)
    finally:
        os.close(broker_fd)
