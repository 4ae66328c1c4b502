"""What a cluster says of the topics of a run, and whether a new run may use them."""

from collections.abc import Collection
from dataclasses import dataclass

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from streamrl.errors import BrokerUnavailableError
from streamrl.kafka.connection import Connection
from streamrl.kafka.positions import end_offsets, first_offsets
from streamrl.kafka.topics import Topics

_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class TopicState:
    """What a cluster says of a topic."""

    topic: str
    partitions: int
    replicas: int
    records: int
    """That it holds now."""


def topic_states(connection: Connection, names: Collection[str]) -> list[TopicState]:
    """Those of the topics that are there.

    Raises:
        BrokerUnavailableError: the cluster did not answer, or refused.
    """
    admin = AdminClient(connection.client_config())
    try:
        found = admin.list_topics(timeout=_TIMEOUT_S).topics
        states = []
        for name in names:
            if name not in found:
                continue
            partitions = found[name].partitions
            first = first_offsets(admin, name, len(partitions), _TIMEOUT_S)
            end = end_offsets(admin, name, len(partitions), _TIMEOUT_S)
            states.append(
                TopicState(
                    topic=name,
                    partitions=len(partitions),
                    replicas=min(len(partition.replicas) for partition in partitions.values()),
                    records=sum(end.values()) - sum(first.values()),
                )
            )
        return states
    except KafkaException as error:
        raise BrokerUnavailableError(f"topics cannot be shown: {error.args[0].str()}{connection.explain()}") from error


def refuse_used_topics(connection: Connection, run_id: str) -> None:
    """For a run that begins: what an earlier run of its name has left in the cluster would be taken for its own.

    Raises:
        ValueError: its topics hold records.
        BrokerUnavailableError: the cluster did not answer, or refused.
    """
    topics = Topics(run_id)
    # Generators that were up before the trainer may have written spans.
    read = (topics.prompts, topics.assignments, topics.rollouts)
    used = [state for state in topic_states(connection, read) if state.records > 0]
    if used:
        raise ValueError(
            f"topics of an earlier run named {run_id} are in the cluster at {connection.settings.bootstrap_servers}: "
            + ", ".join(f"{state.topic} with {state.records} records" for state in used)
            + f". Choose another run.id, or delete them: streamrl topics delete CONFIG --set run.id={run_id}"
        )
