"""The topics of a run: their names, and how they are made."""

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from streamrl.errors import BrokerUnavailableError, RefusedError
from streamrl.kafka.connection import Connection
from streamrl.kafka.outage import TRANSIENT

logger = logging.getLogger(__name__)

_CREATE_TIMEOUT_S = 30.0
_RETRY_S = 0.5
_MAY_BE_THERE = frozenset(
    {
        KafkaError.TOPIC_ALREADY_EXISTS,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.POLICY_VIOLATION,
    }
)
"""Refusals that do not matter when the topic is there."""


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
    """Makes those topics of a run that are not there yet. Any service may call it, at once with others, and with an
    account that may not make topics when they are there.

    Args:
        max_instances: partitions of `assignments`, one an instance.
        names: only these; None: all.

    Returns:
        Those that it made.

    Raises:
        BrokerUnavailableError: the cluster did not answer.
        RefusedError: a topic cannot be made, or one that is there has other partitions than its readers will read.
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
    while refusals := _create(admin, wanted, created, deadline_s - time.monotonic()):
        if all(error.code() in _MAY_BE_THERE for error in refusals.values()):
            check_topics(_partitions_there(admin, refusals, deadline_s), partitions, refusals, topics)
            break
        name, error = next((name, error) for name, error in refusals.items() if error.code() not in _MAY_BE_THERE)
        message = f"topic {name} could not be created: {error.str()}{connection.explain()}"
        if error.code() not in TRANSIENT:
            raise RefusedError(message)
        if time.monotonic() + _RETRY_S > deadline_s:
            raise BrokerUnavailableError(message)
        logger.info("topics are asked for again: %s", error.str())
        time.sleep(_RETRY_S)
    return created


def check_topics(
    there: Mapping[str, int], wanted: Mapping[str, int], refusals: Mapping[str, KafkaError], topics: Topics
) -> None:
    """Whether topics that this process did not make are what it needs.

    Args:
        there: topic to number of partitions, of the cluster.
        wanted: topic to number of partitions.
        refusals: the topics in question, and why they were not made.

    Raises:
        RefusedError: they are not.
    """
    for name, error in refusals.items():
        if name not in there:
            raise RefusedError(
                f"topic {name} is missing, and this account may not make it ({error.str()}): let one that may run "
                "`streamrl topics create`"
            )
        # Samples go to partitions by key, however many there are: a reader must know them all.
        fits = there[name] >= wanted[name] if name == topics.assignments else there[name] == wanted[name]
        if not fits and name in (topics.prompts, topics.assignments, topics.rollouts):
            raise RefusedError(
                f"topic {name} has {there[name]} partitions, expected {wanted[name]} (1 for prompts, "
                "scheduler.max_instances for assignments, kafka.rollout_partitions for rollouts): change that setting, "
                "or delete the topic (`streamrl topics delete`)"
            )


def _create(
    admin: AdminClient, wanted: Sequence[NewTopic], created: list[str], timeout_s: float
) -> dict[str, KafkaError]:
    """Asks for topics, and adds those that were made to `created`.

    Returns:
        Those that were not made, and why.
    """
    timeout_s = min(max(timeout_s, _RETRY_S), _CREATE_TIMEOUT_S)
    # The client must outlive the futures it returned.
    futures = admin.create_topics(list(wanted), operation_timeout=timeout_s, request_timeout=timeout_s)
    refusals: dict[str, KafkaError] = {}
    for name, future in futures.items():
        try:
            future.result()
            created.append(name)
            logger.info("topic %s created", name)
        except KafkaException as error:
            refusals[name] = error.args[0]
    return refusals


def _partitions_there(admin: AdminClient, refusals: Mapping[str, KafkaError], deadline_s: float) -> dict[str, int]:
    """Topics of the cluster and their numbers of partitions, when it shows all those that it says are there: one that
    was made a moment ago may not be known to every broker."""
    made = {name for name, error in refusals.items() if error.code() == KafkaError.TOPIC_ALREADY_EXISTS}
    while True:
        try:
            metadata = admin.list_topics(timeout=_CREATE_TIMEOUT_S)
        except KafkaException as error:
            raise BrokerUnavailableError(f"the cluster does not show its topics: {error.args[0].str()}") from error
        there = {name: len(topic.partitions) for name, topic in metadata.topics.items() if topic.partitions}
        if made <= there.keys() or time.monotonic() + _RETRY_S > deadline_s:
            return there
        time.sleep(_RETRY_S)
