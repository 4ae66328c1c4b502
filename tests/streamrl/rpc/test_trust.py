"""Who may call what, over real connections: every refusal says why, and is logged where it was made."""

import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from streamrl.command.certs import Authority, make_trust
from streamrl.errors import RefusedError, StreamRLError, UnauthenticatedError
from streamrl.rpc import trust
from streamrl.rpc.channel import open_aio_channel
from streamrl.rpc.errors import peer_errors
from streamrl.rpc.server import Server
from streamrl.rpc.trust import ROLES, Identity, use_identity, why_not
from streamrl.v1 import weights_pb2, weights_pb2_grpc

NAME = "streamrl.v1.WeightsService"


class Weights(weights_pb2_grpc.WeightsServiceServicer):
    async def ListVersions(self, request, context):
        return weights_pb2.ListVersionsResponse()

    async def Publish(self, requests, context):
        return weights_pb2.PublishResponse()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trust") / "certs"
    make_trust(folder, days=1)
    return folder


@pytest.fixture(autouse=True)
def no_identity_afterwards() -> Iterator[None]:
    yield
    use_identity(None, "")


@pytest.fixture
async def address(folder: Path) -> AsyncIterator[str]:
    use_identity(folder, "weights")
    server = Server(NAME, lambda s: weights_pb2_grpc.add_WeightsServiceServicer_to_server(Weights(), s))
    yield await server.serve("127.0.0.1:0")
    await server.stop()


def become(identity: Identity | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this process is as a caller; the server listens with what it was."""
    monkeypatch.setattr(trust, "_identity", identity)


async def call(address: str, identity: Identity | None, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    serving = trust.own_identity()
    become(identity, monkeypatch)
    peer = f"weights_svc at {address}"
    async with open_aio_channel(address) as channel:
        # The server looks at its own identity when it authorizes; both live in this process.
        become(serving, monkeypatch)
        stub = weights_pb2_grpc.WeightsServiceStub(channel)
        try:
            with peer_errors_as(identity, peer, monkeypatch):
                if method == "Publish":
                    await stub.Publish(iter([weights_pb2.PublishRequest()]), timeout=20)
                else:
                    await stub.ListVersions(weights_pb2.ListVersionsRequest(), timeout=20)
        finally:
            become(serving, monkeypatch)


class peer_errors_as:  # noqa: N801  (reads as the function that it wraps)
    """peer_errors, with the caller's identity where the error is looked into."""

    def __init__(self, identity: Identity | None, peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._identity, self._monkeypatch, self._errors = identity, monkeypatch, peer_errors(peer)

    def __enter__(self) -> None:
        self._errors.__enter__()

    def __exit__(self, *error: object) -> bool | None:
        become(self._identity, self._monkeypatch)
        return self._errors.__exit__(*error)  # type: ignore[arg-type]


async def refusal(address, identity, monkeypatch, method="ListVersions") -> StreamRLError:
    with pytest.raises(RefusedError) as refused:
        await call(address, identity, monkeypatch, method)
    return refused.value


@pytest.mark.parametrize("role", ROLES)
async def test_every_role_may_look(address, folder, monkeypatch, role):
    await call(address, Identity.load(folder, role), monkeypatch, "ListVersions")


async def test_only_a_trainer_may_publish(address, folder, monkeypatch, caplog):
    await call(address, Identity.load(folder, "trainer"), monkeypatch, "Publish")
    error = await refusal(address, Identity.load(folder, "generator"), monkeypatch, "Publish")
    assert "role generator may not call Publish: only trainer may" in str(error)
    assert "role generator may not call Publish" in caplog.text


async def test_a_call_with_an_unknown_token_or_that_of_another_role_is_refused(address, folder, monkeypatch, caplog):
    generator = Identity.load(folder, "generator")
    error = await refusal(address, replace(generator, token="guessed"), monkeypatch)
    assert "UNAUTHENTICATED" in str(error)
    assert "token that is not known here" in str(error)
    stolen = replace(generator, token=Identity.load(folder, "trainer").token)
    error = await refusal(address, stolen, monkeypatch, "Publish")
    assert "the token of a trainer and the certificate of generator" in str(error)
    assert "the token of a trainer" in caplog.text


async def test_a_certificate_alone_is_not_enough(address, folder, caplog):
    trainer = Identity.load(folder, "trainer")
    tls = grpc.ssl_channel_credentials(trainer.ca, trainer.key, trainer.certificate)
    options = [("grpc.ssl_target_name_override", trust.SERVER_NAME)]
    async with grpc.aio.secure_channel(address, tls, options=options) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="carries no token") as refused:
            await weights_pb2_grpc.WeightsServiceStub(channel).ListVersions(
                weights_pb2.ListVersionsRequest(), timeout=20
            )
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "carries no token" in caplog.text


async def test_plaintext_against_tls_is_refused(address, folder, monkeypatch, capfd):
    assert "it speaks TLS and this process speaks plaintext" in str(await refusal(address, None, monkeypatch))
    # What never came to a call is logged by gRPC itself.
    assert "Handshake failed" in capfd.readouterr().err


async def test_tls_against_plaintext_is_refused(folder, monkeypatch):
    server = Server(NAME, lambda s: weights_pb2_grpc.add_WeightsServiceServicer_to_server(Weights(), s))
    address = await server.serve("127.0.0.1:0")
    error = await refusal(address, Identity.load(folder, "trainer"), monkeypatch)
    await server.stop()
    assert "it speaks plaintext and this process speaks TLS" in str(error)


async def test_a_foreign_service_is_refused(address, tmp_path, monkeypatch):
    make_trust(tmp_path / "foreign", days=1)
    error = await refusal(address, Identity.load(tmp_path / "foreign", "trainer"), monkeypatch)
    assert "its certificate does not pass here" in str(error)


def with_certificate(folder: Path, place: Path, certificate: bytes, key: bytes) -> Identity:
    """A trainer of the right run, but for its certificate."""
    (place / "other.pem").write_bytes(certificate)
    (place / "other.key").write_bytes(key)
    return replace(
        Identity.load(folder, "trainer"),
        certificate=certificate,
        key=key,
        certificate_path=place / "other.pem",
        key_path=place / "other.key",
    )


async def test_a_foreign_certificate_is_refused(address, folder, tmp_path, monkeypatch):
    foreign = Authority(days=1).issue("trainer", days=1)
    error = await refusal(address, with_certificate(folder, tmp_path, *foreign), monkeypatch)
    assert "it does not take the certificate of this trainer" in str(error)


async def test_an_expired_certificate_is_refused(tmp_path, monkeypatch):
    make_trust(tmp_path / "certs", days=1)
    authority = Authority(days=1)
    # The same run, had its authority signed a certificate that is over.
    (tmp_path / "certs" / "ca.pem").write_bytes(authority.certificate_pem())
    for role in ROLES:
        certificate, key = authority.issue(role, days=1)
        (tmp_path / "certs" / f"{role}.pem").write_bytes(certificate)
        (tmp_path / "certs" / f"{role}.key").write_bytes(key)
    use_identity(tmp_path / "certs", "weights")
    server = Server(NAME, lambda s: weights_pb2_grpc.add_WeightsServiceServicer_to_server(Weights(), s))
    address = await server.serve("127.0.0.1:0")
    expired = with_certificate(tmp_path / "certs", tmp_path, *authority.issue("trainer", days=-1))
    error = await refusal(address, expired, monkeypatch)
    await server.stop()
    assert "does not take the certificate of this trainer" in str(error) and "expired" in str(error)


async def test_a_call_without_a_token_is_refused(folder):
    with pytest.raises(UnauthenticatedError, match="carries no token"):
        trust.authorize(Identity.load(folder, "weights"), "/streamrl.v1.WeightsService/Publish", (), ("trainer",))


def test_roles():
    assert why_not("trainer", "/streamrl.v1.WeightsService/Publish") is None
    assert why_not("generator", "/streamrl.v1.WeightsService/Fetch") is None
    assert why_not("weights", "/streamrl.v1.WeightsService/Rewind") == (
        "role weights may not call Rewind: only trainer may"
    )


def test_a_folder_that_lacks_a_file_is_bad_input(folder, tmp_path):
    with pytest.raises(ValueError, match=r"rpc.trust: cannot read .*tokens.json"):
        Identity.load(tmp_path, "trainer")


def written(name: str, content: bytes | None) -> Callable[[Path], None]:
    """Puts this into a file; None: what lies in the trainer's file of the kind."""

    def write(folder: Path) -> None:
        other = folder / f"trainer{Path(name).suffix}"
        (folder / name).write_bytes(other.read_bytes() if content is None else content)

    return write


def certified(folder: Path, role: str, *, days: float) -> None:
    """Another authority's certificate."""
    certificate, key = Authority(days=1).issue(role, days=days)
    (folder / "weights.pem").write_bytes(certificate)
    (folder / "weights.key").write_bytes(key)


def certified_from_tomorrow(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("streamrl.command.certs._CLOCK_SKEW", -timedelta(days=1))
        certified(folder, "weights", days=2)


def with_a_password(folder: Path) -> None:
    key = load_pem_private_key((folder / "weights.key").read_bytes(), None)
    sealed = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    (folder / "weights.key").write_bytes(sealed)


@pytest.mark.parametrize(
    "spoil, message",
    [
        (written("tokens.json", b"\xff\xfe"), r"tokens.json is no JSON"),
        (written("tokens.json", b'{"ab": ["trainer"]}'), r"tokens.json: expected the digest of each token to one of"),
        (written("tokens.json", b"{}"), r"tokens.json does not know weights.token as the token of a weights"),
        (written("weights.token", None), r"tokens.json does not know weights.token as the token of a weights"),
        (written("weights.token", b""), r"weights.token: expected one word"),
        (written("weights.token", b"\xff\xfe"), r"weights.token: expected one word"),
        (written("ca.pem", b""), r"ca.pem: expected a certificate, PEM"),
        (written("ca.pem", b"no certificate"), r"ca.pem: expected a certificate, PEM"),
        (written("weights.pem", b"no certificate"), r"weights.key: expected a certificate and its key"),
        (written("weights.key", b""), r"weights.key: expected a certificate and its key"),
        (written("weights.key", None), r"weights.key: expected a certificate and its key"),
        (with_a_password, r"the key without a password"),
        (lambda folder: certified(folder, "trainer", days=1), r"is for trainer: expected 'weights' as its common name"),
        (lambda folder: certified(folder, "weights", days=-1), r"weights.pem has expired on"),
        (certified_from_tomorrow, r"weights.pem is valid from .* UTC here: set this machine's clock"),
    ],
)
def test_files_that_do_not_fit_are_bad_input_before_anything_listens_or_calls(folder, tmp_path, spoil, message):
    spoilt = tmp_path / "spoilt"
    shutil.copytree(folder, spoilt)
    spoil(spoilt)
    with pytest.raises(ValueError, match=rf"rpc.trust: .*{message}"):
        Identity.load(spoilt, "weights")
