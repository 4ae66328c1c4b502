"""How we connect to Kafka: librdkafka's settings, and what its error callback said last."""

import logging
import math
import re
import threading
import time
from typing import Any, NoReturn

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from streamrl.errors import BrokerUnavailableError, RefusedError
from streamrl.kafka.outage import TRANSIENT
from streamrl.settings import KafkaSection

logger = logging.getLogger(__name__)
_LIBRDKAFKA = logging.getLogger("librdkafka")

_SAY_AGAIN_S = 30.0
"""A client that looks for its broker meets the same error many times a second."""
_ELAPSED = re.compile(r" \(after \d+ms in state .*\)$")
_RETRY_S = 0.5
_LEAST_TIMEOUT_S = 0.1
_FIRST_WAIT_S = 1.0
"""A refusal is seen between two questions: the first waits come short, and double."""
_REFUSALS = frozenset({KafkaError._AUTHENTICATION, KafkaError._SSL})
"""Codes of failures that no waiting heals."""


class Connection:
    """What producers, readers and admin calls of one process share.

    A wrong password or a refused TLS handshake shows only in librdkafka's error callback, while the call itself just
    times out: `explain` brings the two together.
    """

    def __init__(self, settings: KafkaSection, client_id: str) -> None:
        if not settings.bootstrap_servers:
            raise ValueError("kafka.bootstrap_servers is empty: expected host:port of a Kafka broker")
        self.settings = settings
        self._client_id = client_id
        self._lock = threading.Lock()
        self._last_error = ""
        self._refusal = ""
        self._num_errors = 0
        self._said_at_s: dict[str, float] = {}
        _LIBRDKAFKA.addFilter(_is_no_failure)

    def client_config(self, **extra: Any) -> dict[str, Any]:
        """librdkafka's configuration: ours, then the user's `kafka.client`, then the caller's."""
        return {
            "bootstrap.servers": self.settings.bootstrap_servers,
            "client.id": self._client_id,
            "error_cb": self._on_error,
            "logger": _LIBRDKAFKA,
            "broker.address.ttl": 1000,
            "reconnect.backoff.max.ms": 2000,
            "socket.keepalive.enable": True,
            **self.settings.client,
            **extra,
        }

    def explain(self) -> str:
        """What the error callback said last, for an error message; empty when nothing."""
        with self._lock:
            return f" ({self._last_error})" if self._last_error else ""

    @property
    def num_errors(self) -> int:
        """How often the error callback has spoken, of any client: a connection broke, or could not be made."""
        with self._lock:
            return self._num_errors

    def check(self, timeout_s: float | None = None) -> None:
        """Asks the cluster for its metadata until it answers.

        Args:
            timeout_s: None: `kafka.patience_s`.

        Raises:
            RefusedError: it does not take our password or certificate, or we not its.
            BrokerUnavailableError: no answer within `timeout_s`.
        """
        timeout_s = self.settings.patience_s if timeout_s is None else timeout_s
        deadline_s = time.monotonic() + timeout_s
        admin = AdminClient(self.client_config())
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                admin.list_topics(timeout=max(min(wait_s, deadline_s - time.monotonic()), _LEAST_TIMEOUT_S))
                return
            except KafkaException as error:
                # Only now are the client's callbacks called.
                admin.poll(0)
                self._raise_refusal(error)
                if error.args[0].code() not in TRANSIENT or time.monotonic() + _RETRY_S > deadline_s:
                    self._raise_unavailable(error, timeout_s)
                logger.info("the broker is asked again: %s%s", error.args[0].str(), self.explain())
                time.sleep(_RETRY_S)
                wait_s *= 2

    def _raise_refusal(self, error: KafkaException) -> None:
        with self._lock:
            refusal = self._refusal
        if refusal:
            raise RefusedError(
                f"the Kafka cluster at {self.settings.bootstrap_servers} refuses us, or we it: {refusal}. Check "
                "sasl.username, sasl.password and sasl.mechanism, or ssl.ca.location and the broker's certificate, "
                "under kafka.client"
            ) from error

    def _raise_unavailable(self, error: KafkaException, timeout_s: float) -> NoReturn:
        raise BrokerUnavailableError(
            f"no Kafka broker answers at {self.settings.bootstrap_servers} within {timeout_s:g} s: "
            f"{error.args[0].str()}{self.explain()}. Check kafka.bootstrap_servers and kafka.client, or leave "
            f"kafka.bootstrap_servers empty for the embedded broker."
        ) from error

    def _on_error(self, error: KafkaError) -> None:
        now_s = time.monotonic()
        subject = _ELAPSED.sub("", error.str())
        with self._lock:
            self._num_errors += 1
            if error.code() != KafkaError._ALL_BROKERS_DOWN or not self._last_error:
                # That all are down says less than why the last of them is.
                self._last_error = error.str()
            if error.code() in _REFUSALS:
                self._refusal = error.str()
            is_news = now_s - self._said_at_s.get(subject, -math.inf) > _SAY_AGAIN_S
            if is_news:
                self._said_at_s[subject] = now_s
        if is_news:
            logger.log(logging.ERROR if error.fatal() else logging.WARNING, "Kafka: %s", error.str())


def _is_no_failure(record: logging.LogRecord) -> bool:
    """What librdkafka logs as FAIL, it tells the error callback too."""
    return not record.getMessage().startswith("FAIL ")
