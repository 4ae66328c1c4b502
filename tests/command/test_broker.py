"""The embedded broker: ready when it says so, gone when it must be."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from streamrl import lifetime
from streamrl.command.broker import BrokerLaunch, EmbeddedBroker, check_embedded
from streamrl.errors import BrokerUnavailableError
from streamrl.kafka.connection import Connection
from streamrl.settings import KafkaSection


def test_a_started_broker_answers_metadata_requests(kafka_settings: KafkaSection) -> None:
    metadata = AdminClient(Connection(kafka_settings, "test").client_config()).list_topics(timeout=5)
    assert len(metadata.brokers) == 1


def test_a_stopped_broker_is_gone_and_its_port_free(tmp_path: Path) -> None:
    with EmbeddedBroker.start(KafkaSection(), data=tmp_path, log=tmp_path / "broker.log") as broker:
        broker.wait_ready()
    assert broker.process.returncode is not None
    with pytest.raises(BrokerUnavailableError, match="no Kafka broker answers"):
        Connection(broker.settings(KafkaSection()), "test").check(0.5)


def test_a_dead_broker_is_started_again_at_its_address(tmp_path: Path) -> None:
    with EmbeddedBroker.start(KafkaSection(), data=tmp_path, log=tmp_path / "broker.log") as broker:
        broker.wait_ready()
        dead = broker.process
        dead.kill()
        dead.wait()
        broker.start_again()
        broker.wait_ready()
        assert broker.process.pid != dead.pid
        Connection(broker.settings(KafkaSection()), "test").check(5)


def test_a_broker_that_ends_while_it_starts_says_why(tmp_path: Path) -> None:
    command = ("sh", "-c", "echo no memory left >&2; exit 3")
    launch = BrokerLaunch(command, "127.0.0.1:1", is_durable=False, ready_timeout_s=15)
    with pytest.raises(BrokerUnavailableError, match=r"ended with code 3[\s\S]*no memory left"):
        EmbeddedBroker(launch, tmp_path / "broker.log").wait_ready()


def test_a_broker_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from streamrl.command.broker import EmbeddedBroker\n"
        "from streamrl.settings import KafkaSection; log = Path(sys.argv[1])\n"
        "broker = EmbeddedBroker.start(KafkaSection(), data=log.parent, log=log)\n"
        "print(broker.process.pid, flush=True); time.sleep(60)"
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


def test_a_folder_of_apache_kafka_that_is_not_there_is_told_whichever_broker_is_meant() -> None:
    for settings in (KafkaSection(home="/nonexistent"), KafkaSection(home="/nonexistent", embedded="apache")):
        with pytest.raises(ValueError, match=r"^kafka\.home is /nonexistent, where no "):
            check_embedded(settings)
