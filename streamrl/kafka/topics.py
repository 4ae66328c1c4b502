"""The topics of a run: their names, and how they are made."""

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from streamrl.errors import BrokerUnavailableError
from streamrl.kafka.connection import Connection
from streamrl.kafka.outage import TRANSIENT

logger = logging.getLogger(__name__)

_CREATE_TIMEOUT_S = 30.0
_RETRY_S = 0.5


@dataclass(frozen=True)
class Topics:
    """Names of a run's topics: streamrl.<run>.<kind>."""

    run_id: str

    @property
    def prompts(self) -> str:
        return f"streamrl.{self.run_id}.prompts"

    @property
    def assignments(self) -> str:
        return f"streamrl.{self.run_id}.assignments"

    @property
    def rollouts(self) -> str:
        return f"streamrl.{self.run_id}.rollouts"

    @property
    def dead_letters(self) -> str:
        return f"streamrl.{self.run_id}.dead-letters"

    @property
    def spans(self) -> str:
        return f"streamrl.{self.run_id}.spans"

    @property
    def all(self) -> tuple[str, ...]:
        """Those of the site where the training is: `assignments` goes from there to other sites, `rollouts`,
        `dead_letters` and `spans` come from them."""
        return (self.prompts, *self.of_generation_site)

    @property
    def of_generation_site(self) -> tuple[str, ...]:
        """Those of a site that has generators alone; its broker may be another one. Prompts stay home."""
        return (self.assignments, self.rollouts, self.dead_letters, self.spans)


def create_topics(
    connection: Connection, topics: Topics, max_instances: int, *, names: Collection[str] | None = None
) -> list[str]:
    """Makes those topics of a run that are not there yet. Any service may call it, at once with others.

    Args:
        max_instances: partitions of `assignments`, one an instance.
        names: only these; None: all.

    Returns:
        Those that it made.

    Raises:
        BrokerUnavailableError: the cluster did not answer, or refused.
    """
    settings = connection.settings
    partitions = {
        topics.prompts: 1,
        topics.assignments: max_instances,
        topics.rollouts: settings.rollout_partitions,
        topics.dead_letters: 1,
        topics.spans: 1,
    }
    config = {
        "retention.ms": str(int(settings.retention_hours * 3_600_000)),
        "retention.bytes": str(settings.retention_bytes),
        "max.message.bytes": str(settings.max_message_bytes),
    }
    wanted = [
        NewTopic(name, num_partitions=count, replication_factor=settings.replication_factor, config=config)
        for name, count in partitions.items()
        if names is None or name in names
    ]
    admin = AdminClient(connection.client_config())
    created: list[str] = []
    deadline_s = time.monotonic() + settings.patience_s
    while (refused := _create(admin, wanted, created, deadline_s - time.monotonic())) is not None:
        name, error = refused
        if error.code() not in TRANSIENT or time.monotonic() + _RETRY_S > deadline_s:
            raise BrokerUnavailableError(f"topic {name} could not be created: {error.str()}{connection.explain()}")
        logger.info("topics are asked for again: %s", error.str())
        time.sleep(_RETRY_S)
    return created


def _create(
    admin: AdminClient, wanted: Sequence[NewTopic], created: list[str], timeout_s: float
) -> tuple[str, KafkaError] | None:
    """Asks for topics, and adds those that were made to `created`.

    Returns:
        A topic that could not be made, and why; None: all are there.
    """
    timeout_s = min(max(timeout_s, _RETRY_S), _CREATE_TIMEOUT_S)
    # The client must outlive the futures it returned.
    futures = admin.create_topics(list(wanted), operation_timeout=timeout_s, request_timeout=timeout_s)
    refused: tuple[str, KafkaError] | None = None
    for name, future in futures.items():
        try:
            future.result()
            created.append(name)
            logger.info("topic %s created", name)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                refused = name, error.args[0]
    return refused
