"""What librdkafka is told by the user, tried out before anything starts."""

from typing import Any

import pytest

from streamrl.kafka.client_check import check_client
from streamrl.settings import KafkaSection


@pytest.mark.parametrize(
    ("client", "expected"),
    [
        ({"acks": 0}, "got acks = 0"),
        ({"max.in.flight": 10}, "max.in.flight"),
        ({"fetch.max.bytes": 10}, "fetch.max.bytes"),
        ({"no.such.name": 1}, "no.such.name"),
        ({"security.protocol": "x"}, "security.protocol"),
        ({"transactional.id": "q"}, "transactional.id = 'q': leave it out"),
        ({"bootstrap.servers": "a:1"}, "kafka.bootstrap_servers says"),
    ],
)
def test_what_librdkafka_would_refuse_later_is_refused_by_name(client: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=r"^kafka\.client") as caught:
        check_client(KafkaSection(client=client))
    assert expected in str(caught.value)


def test_a_refusal_shows_no_password() -> None:
    with pytest.raises(ValueError, match=r"no\.such\.name") as caught:
        check_client(KafkaSection(client={"no.such.name": 1, "sasl.password": "hush"}))
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("extreme", [{"patience_s": 604800.0, "max_message_bytes": 10**9}, {"patience_s": 0.1}])
def test_librdkafka_takes_all_that_the_settings_allow(extreme: dict[str, Any]) -> None:
    check_client(KafkaSection(client={"security.protocol": "PLAINTEXT", "socket.timeout.ms": 5000}, **extreme))
