"""SASL and TLS against a real Apache Kafka: what passes through, and what is said when it does not fit."""

import datetime
import ipaddress
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from streamrl import lifetime
from streamrl.command.apache_kafka import KafkaDownload
from streamrl.command.ports import free_port
from streamrl.errors import RefusedError
from streamrl.kafka.connection import Connection
from streamrl.kafka.producer import RecordProducer
from streamrl.kafka.reader import RecordReader, all_partitions
from streamrl.kafka.topics import Topics, create_topics
from streamrl.settings import KafkaSection

pytestmark = pytest.mark.kafka

PASSWORD = "correct horse"
ACCOUNT: dict[str, str | int | float | bool] = {
    "sasl.mechanism": "PLAIN",
    "sasl.username": "streamrl",
    "sasl.password": PASSWORD,
}


@dataclass(frozen=True)
class Node:
    """A node that nobody may use without a password."""

    plain: KafkaSection
    """SASL without TLS."""
    encrypted: KafkaSection
    """SASL with TLS; the authority that signed the broker's certificate is known."""
    guest: KafkaSection
    """An account that may use topics, and not make any."""
    stranger: Path
    """The certificate of another authority."""


@pytest.fixture(scope="module")
def node(kafka_download: KafkaDownload, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder, port = tmp_path_factory.mktemp("secure-kafka"), free_port()
    sasl_port, tls_port = free_port(taken={port, port + 1}), free_port(taken={port, port + 1})
    authority, stranger = write_authority(folder / "authority.pem"), folder / "stranger.pem"
    write_authority(stranger)
    write_server_key(folder / "server.pem", authority)
    clients = f"SASL_PLAINTEXT://127.0.0.1:{sasl_port},SASL_SSL://127.0.0.1:{tls_port}"
    accounts = (
        "org.apache.kafka.common.security.plain.PlainLoginModule required "
        f'username="broker" password="{PASSWORD}" user_broker="{PASSWORD}" user_streamrl="{PASSWORD}" '
        f'user_guest="{PASSWORD}";'
    )
    properties = {
        "listeners": f"{clients},CONTROLLER://127.0.0.1:{port + 1}",
        "advertised.listeners": clients,
        "security.inter.broker.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism.inter.broker.protocol": "PLAIN",
        "sasl.enabled.mechanisms": "PLAIN",
        "listener.name.sasl_plaintext.plain.sasl.jaas.config": accounts,
        "listener.name.sasl_ssl.plain.sasl.jaas.config": accounts,
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:broker;User:streamrl;User:ANONYMOUS",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(folder / "server.pem"),
    }
    process = lifetime.spawn(
        kafka_download.command(folder / "data", port, properties),
        env=kafka_download.environment(folder / "data"),
        log=folder / "broker.log",
        with_signal=signal.SIGKILL,
    )
    plain = KafkaSection(
        bootstrap_servers=f"127.0.0.1:{sasl_port}", client={"security.protocol": "SASL_PLAINTEXT", **ACCOUNT}
    )
    encrypted = KafkaSection(
        bootstrap_servers=f"127.0.0.1:{tls_port}",
        client={"security.protocol": "SASL_SSL", "ssl.ca.location": str(folder / "authority.pem"), **ACCOUNT},
    )
    try:
        Connection(plain, "test").check(timeout_s=60)
        allow_guest(Connection(plain, "test"))
        guest = plain.model_copy(update={"client": {**plain.client, "sasl.username": "guest"}})
        yield Node(plain, encrypted, guest, stranger)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("protocol", ["plain", "encrypted"])
def test_records_go_there_and_back_with_password_and_certificate(node: Node, protocol: str) -> None:
    settings: KafkaSection = getattr(node, protocol)
    connection, topics = Connection(settings, "test"), Topics(protocol)
    connection.check(timeout_s=20)
    assert set(create_topics(connection, topics, max_instances=1)) == set(topics.all)
    with RecordProducer(connection) as producer:
        producer.send(topics.rollouts, b"secret")
    reader = RecordReader(connection, topics.rollouts, all_partitions(settings.rollout_partitions))
    assert [record.value for record in reader.read(20)] == [b"secret"]
    reader.close()


@pytest.mark.parametrize("protocol", ["plain", "encrypted"])
def test_a_wrong_password_is_said_at_once_whatever_the_patience(node: Node, protocol: str) -> None:
    right: KafkaSection = getattr(node, protocol)
    wrong = right.model_copy(update={"client": {**right.client, "sasl.password": "guess"}, "patience_s": 3600.0})
    with pytest.raises(RefusedError, match=r"refuses us.*Invalid username or password.*sasl\.password") as refusal:
        Connection(wrong, "test").check()
    assert "guess" not in str(refusal.value)


def test_a_broker_that_an_unknown_authority_vouches_for_is_refused(node: Node) -> None:
    client = {**node.encrypted.client, "ssl.ca.location": str(node.stranger)}
    with pytest.raises(RefusedError, match=r"certificate verify failed.*ssl\.ca\.location"):
        Connection(node.encrypted.model_copy(update={"client": client}), "test").check()


def test_an_account_that_may_not_make_topics_uses_those_that_are_there(node: Node) -> None:
    topics, guest = Topics("made-by-others"), Connection(node.guest, "test")
    with pytest.raises(RefusedError, match=r"is missing, and this account may not make it.*streamrl topics create"):
        create_topics(guest, topics, max_instances=1)
    create_topics(Connection(node.plain, "test"), topics, max_instances=1)
    assert create_topics(guest, topics, max_instances=1) == []
    with RecordProducer(guest) as producer:
        producer.send(topics.prompts, b"mine")
    reader = RecordReader(guest, topics.prompts, {0: None})
    assert [record.value for record in reader.read(20)] == [b"mine"]
    reader.close()


def allow_guest(connection: Connection) -> None:
    """What an operator grants to the services."""
    grants = [
        AclBinding(
            kind, "streamrl.", ResourcePatternType.PREFIXED, "User:guest", "*", operation, AclPermissionType.ALLOW
        )
        for kind, operations in (
            (ResourceType.TOPIC, (AclOperation.READ, AclOperation.WRITE, AclOperation.DESCRIBE)),
            (ResourceType.GROUP, (AclOperation.READ,)),
        )
        for operation in operations
    ]
    admin = AdminClient(connection.client_config())
    for future in admin.create_acls(grants).values():
        future.result()


Authority = tuple[x509.Name, ec.EllipticCurvePrivateKey]


def write_authority(certificate: Path) -> Authority:
    """Makes an authority that signs certificates."""
    name, key = (
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, certificate.stem)]),
        ec.generate_private_key(ec.SECP256R1()),
    )
    signed = (
        builder(name, name, key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    return name, key


def write_server_key(file: Path, authority: Authority) -> None:
    """A key and its certificate for 127.0.0.1, as a broker reads them."""
    issuer, issuer_key = authority
    key = ec.generate_private_key(ec.SECP256R1())
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "broker")])
    signed = builder(name, issuer, key).add_extension(address, critical=False).sign(issuer_key, hashes.SHA256())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file.write_bytes(private + signed.public_bytes(serialization.Encoding.PEM))


def builder(name: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
    )
