"""The topics of a run: their names, and how they are made."""

import logging
from dataclasses import dataclass

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from streamrl.errors import BrokerUnavailableError
from streamrl.kafka.connection import Connection

logger = logging.getLogger(__name__)

_CREATE_TIMEOUT_S = 30.0


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


def create_topics(connection: Connection, topics: Topics, max_instances: int) -> None:
    """Makes those topics of a run that are not there yet. Any service may call it, at once with others.

    Args:
        max_instances: partitions of `assignments`, one an instance.

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
    admin = AdminClient(connection.client_config())
    # The client must outlive the futures it returned.
    futures = admin.create_topics(
        [
            NewTopic(name, num_partitions=count, replication_factor=settings.replication_factor, config=config)
            for name, count in partitions.items()
        ],
        operation_timeout=_CREATE_TIMEOUT_S,
        request_timeout=_CREATE_TIMEOUT_S,
    )
    for name, future in futures.items():
        try:
            future.result()
            logger.info("topic %s created", name)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise BrokerUnavailableError(
                    f"topic {name} could not be created: {error.args[0].str()}{connection.explain()}"
                ) from error
