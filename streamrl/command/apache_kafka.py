"""One node of Apache Kafka from a download on this machine: broker and KRaft controller in one process, on loopback.

Its topics lie in a folder. A node that is killed and started again on its folder has every record that it had
acknowledged; the folder outlives the process, but what the system had not written to disk is lost with the machine.
"""

import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

_CLUSTER_ID = "c3RyZWFtcmwtZW1iZWRkZQ"
"""The node is a cluster of its own, on loopback: there is no other that it could be mistaken for."""
_HEAP = "-Xms128m -Xmx512m"


class KafkaDownload:
    """A folder with Apache Kafka: an unpacked release, or one whose command `broker` runs a node."""

    def __init__(self, home: Path, java: Path) -> None:
        self.home = home
        self._java = java

    @classmethod
    def find(cls, home: str) -> "KafkaDownload":
        """The one that is meant, with a Java to run it.

        Args:
            home: its folder; empty: the environment variable KAFKA_HOME.

        Raises:
            ValueError: there is none, or no Java.
        """
        given = home or os.environ.get("KAFKA_HOME", "")
        name = "kafka.home" if home else "KAFKA_HOME"
        if not given:
            raise ValueError(
                'neither kafka.home nor KAFKA_HOME says where the Apache Kafka of kafka.embedded = "apache" is: unpack '
                "a binary release of https://kafka.apache.org/downloads and give its folder"
            )
        folder = Path(given).expanduser().resolve()
        if not _server_start(folder).is_file() and not _broker(folder).is_file():
            raise ValueError(
                f"{name} is {given}, where no Apache Kafka is: expected the folder of an unpacked binary release, with "
                "bin/kafka-server-start.sh"
            )
        return cls(folder, find_java())

    def command(self, data: Path, port: int, properties: Mapping[str, str]) -> list[str]:
        """What runs the node in the foreground, on a new or an old folder of data. Its process is the node's.

        Args:
            data: where the node keeps its topics; made when it is not there.
            port: of clients, on 127.0.0.1; the controller listens on the next one.
            properties: more lines of server.properties; they win over ours.
        """
        data.mkdir(parents=True, exist_ok=True)
        if not _server_start(self.home).is_file():
            lines = [part for name, value in properties.items() for part in ("--set", f"{name}={value}")]
            return [str(_broker(self.home)), "--dir", str(data), "--port", str(port), *lines]
        file = data / "server.properties"
        file.write_text(
            "".join(f"{name}={value}\n" for name, value in {**_properties(data, port), **properties}.items())
        )
        storage = shlex.join(
            [str(self.home / "bin/kafka-storage.sh"), "format", "--config", str(file), "--cluster-id", _CLUSTER_ID]
        )
        formatted = shlex.quote(str(_log_folder(data) / "meta.properties"))
        start = shlex.join([str(_server_start(self.home)), str(file)])
        return ["/bin/sh", "-c", f"[ -e {formatted} ] || {storage} || exit; exec {start}"]

    def environment(self, data: Path) -> dict[str, str]:
        """What the command is to find in its environment."""
        path = os.pathsep.join([str(self._java.parent), os.environ.get("PATH", os.defpath)])
        # The scripts of a release write their own logs into the release, which may belong to somebody else; EXTRA_ARGS
        # without -loggc: a log of garbage collections grows to a gigabyte.
        ours = {"PATH": path, "LOG_DIR": str(data / "logs"), "EXTRA_ARGS": "-name kafkaServer"}
        return {"KAFKA_HEAP_OPTS": _HEAP, **os.environ, **ours}


def find_java() -> Path:
    """The program `java` of JAVA_HOME, else of PATH.

    Raises:
        ValueError: there is none.
    """
    home = os.environ.get("JAVA_HOME")
    program = shutil.which("java", path=f"{home}/bin") if home else shutil.which("java")
    if program is None:
        where = f"{home}/bin (JAVA_HOME)" if home else "PATH"
        raise ValueError(
            f"Apache Kafka needs Java, and there is no `java` in {where}: install Java 17 or later (Debian: apt-get "
            "install openjdk-17-jre-headless)"
        )
    return Path(program)


def _server_start(home: Path) -> Path:
    return home / "bin/kafka-server-start.sh"


def _broker(home: Path) -> Path:
    return home / "broker"


def _log_folder(data: Path) -> Path:
    return data / "log"


def _properties(data: Path, port: int) -> dict[str, str]:
    controller = f"127.0.0.1:{port + 1}"
    return {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@{controller}",
        "controller.listener.names": "CONTROLLER",
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://{controller}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SSL:SSL,"
        "SASL_PLAINTEXT:SASL_PLAINTEXT,SASL_SSL:SASL_SSL",
        "log.dirs": str(_log_folder(data)),
        "offsets.topic.replication.factor": "1",
        "offsets.topic.num.partitions": "4",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "transaction.state.log.num.partitions": "4",
        "share.coordinator.state.topic.replication.factor": "1",
        "share.coordinator.state.topic.min.isr": "1",
        "group.initial.rebalance.delay.ms": "0",
        # A service that reads before anybody has made its topic must not get one of other partitions.
        "auto.create.topics.enable": "false",
    }
