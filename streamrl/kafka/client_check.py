"""Whether librdkafka takes the user's own settings, tried out before anything starts. Connects to nobody."""

import re

from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from streamrl.kafka.producer import producer_config
from streamrl.kafka.reader import reader_config
from streamrl.settings import KafkaSection

_SECRET = re.compile(r"password|secret|token|key|jaas|oauthbearer\.config", re.IGNORECASE)
_ELSEWHERE = {
    "bootstrap.servers": "kafka.bootstrap_servers says where the brokers are",
    "metadata.broker.list": "kafka.bootstrap_servers says where the brokers are",
    "compression.type": "kafka.compression says how producers compress",
    "compression.codec": "kafka.compression says how producers compress",
    "message.max.bytes": "kafka.max_message_bytes says how large a record may be",
    "fetch.message.max.bytes": "kafka.max_message_bytes says how large a record may be",
    "max.partition.fetch.bytes": "kafka.max_message_bytes says how large a record may be",
    "delivery.timeout.ms": "kafka.patience_s says how long a record may take",
    "message.timeout.ms": "kafka.patience_s says how long a record may take",
    "transactional.id": "records are sent outside of transactions",
    "enable.idempotence": "producers are idempotent always",
}
"""Of librdkafka's settings, those that are not the user's to set here, and why."""


def check_client(settings: KafkaSection) -> None:
    """Makes each kind of client as the services make it, but without a broker's address.

    Raises:
        ValueError: librdkafka does not take the settings under `kafka.client`, or one of them is not taken from there.
    """
    for name, value in settings.client.items():
        if name in _ELSEWHERE:
            raise ValueError(f"kafka.client has {name} = {value!r}: leave it out, for {_ELSEWHERE[name]}")
    # Without a broker's address a client has nobody to speak to, and would log that.
    client = {**settings.client, "log_level": 0}
    try:
        AdminClient(client)
        Producer({**client, **producer_config(settings)})
        Consumer({**client, **reader_config(settings, "streamrl.check")}).close()
    except (KafkaException, TypeError, ValueError) as error:
        reason = error.args[0].str() if isinstance(error, KafkaException) else str(error)
        raise ValueError(
            f"kafka.client: {reason}. Expected names and values of librdkafka's configuration, got "
            + (", ".join(_shown(name, value, reason) for name, value in settings.client.items()) or "nothing")
        ) from error


def _shown(name: str, value: object, reason: str) -> str:
    """A setting with its value where the reason speaks of it; a secret without."""
    return f"{name} = {value!r}" if name in reason and not _SECRET.search(name) else name
