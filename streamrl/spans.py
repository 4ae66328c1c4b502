"""Topic `spans`: what each service did from when to when. Best effort: a lost span never stops a service."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from streamrl.errors import BrokerUnavailableError
from streamrl.kafka.producer import RecordProducer
from streamrl.v1.records_pb2 import Span

logger = logging.getLogger(__name__)


class SpanLog:
    """Writes the spans of one process."""

    def __init__(self, producer: RecordProducer, topic: str, *, service: str, instance: str, attempt: int) -> None:
        self._producer = producer
        self._topic = topic
        self._service = service
        self._instance = instance
        self._attempt = attempt

    def write(
        self,
        activity: str,
        started_s: float,
        finished_s: float,
        *,
        detail: str = "",
        batch: int = 0,
        weight_version: int = 0,
    ) -> None:
        """Writes one span.

        Args:
            activity: generate, switch, train, publish, evaluate, checkpoint or wait.
            detail: for wait: whom for.
            started_s, finished_s: Unix times.
        """
        span = Span(
            attempt=self._attempt,
            service=self._service,
            instance=self._instance,
            activity=activity,
            detail=detail,
            started_s=started_s,
            finished_s=finished_s,
            batch=batch,
            weight_version=weight_version,
        )
        try:
            self._producer.send(self._topic, span.SerializeToString(), key=self._instance.encode())
        except BrokerUnavailableError as error:
            logger.warning("span %s is lost: %s", activity, error)

    @contextmanager
    def span(self, activity: str, *, detail: str = "", batch: int = 0, weight_version: int = 0) -> Iterator[None]:
        """Writes a span over the block, also when it raises."""
        started_s = time.time()
        try:
            yield
        finally:
            self.write(activity, started_s, time.time(), detail=detail, batch=batch, weight_version=weight_version)
