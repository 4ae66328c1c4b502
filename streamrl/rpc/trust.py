"""What the services of a run know each other by: TLS with certificates on both sides, and a token a role.

One folder has it all, as `streamrl certs` makes it for trials and as a cluster mounts what its users bring:

    ca.pem                   who signs: a certificate that this one has not signed is foreign
    ROLE.pem, ROLE.key       certificate and key; its common name is the role, and `streamrl` one of its DNS names
    ROLE.token               what calls of this role carry
    tokens.json              BLAKE3 of each token, hex, to the role: enough to know a token, not to make one

A process needs ca.pem, tokens.json and the three files of its own role; it has one identity, which `service.main` or
the command gives it once, before it opens any channel. Without one it speaks plaintext. What a caller may do is decided
in `why_not`, a pure function.
"""

import re
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from streamrl.digest import bytes_digest
from streamrl.errors import ForbiddenError, UnauthenticatedError
from streamrl.json_object import object_of

ROLES = ("trainer", "scheduler", "generator", "weights", "command")
"""command: who watches and stops a run."""
SERVER_NAME = "streamrl"
"""Every certificate has this DNS name: services are told apart by who signed them, not by where they stand."""

_WEIGHTS, _SCHEDULER = "/streamrl.v1.WeightsService", "/streamrl.v1.SchedulerService"
_TRAINER, _GENERATOR = "/streamrl.v1.TrainerService", "/streamrl.v1.GeneratorService"
_MAY_CALL: Mapping[str, frozenset[str]] = {
    f"{_WEIGHTS}/Publish": frozenset({"trainer"}),
    f"{_WEIGHTS}/Rewind": frozenset({"trainer"}),
    f"{_WEIGHTS}/Acknowledge": frozenset({"generator", "weights"}),
    f"{_SCHEDULER}/Register": frozenset({"generator"}),
    f"{_SCHEDULER}/Heartbeat": frozenset({"generator"}),
    f"{_SCHEDULER}/Drain": frozenset({"generator", "command"}),
    f"{_SCHEDULER}/ReportBatch": frozenset({"trainer"}),
    f"{_SCHEDULER}/SetPhase": frozenset({"trainer"}),
    f"{_TRAINER}/Pause": frozenset({"command"}),
    f"{_TRAINER}/Resume": frozenset({"command"}),
    f"{_TRAINER}/Checkpoint": frozenset({"command"}),
    f"{_TRAINER}/Stop": frozenset({"command"}),
    f"{_GENERATOR}/Pause": frozenset({"command"}),
    f"{_GENERATOR}/Resume": frozenset({"command"}),
    f"{_GENERATOR}/Drain": frozenset({"command"}),
}
"""Who may call what changes something. The other methods tell, to every role, how things are, and hand weights out."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a process is to its peers."""

    role: str
    ca: bytes
    certificate: bytes
    key: bytes
    certificate_path: Path
    key_path: Path
    token: str
    roles_by_token_digest: Mapping[str, str]

    @classmethod
    def load(cls, folder: Path, role: str) -> "Identity":
        """
        Raises:
            ValueError: a file is missing, is not what it should be, or does not fit the others.
        """
        tokens = _read_tokens(folder / "tokens.json")
        identity = cls(
            role,
            ca=_read(folder / "ca.pem"),
            certificate=_read(folder / f"{role}.pem"),
            key=_read(folder / f"{role}.key"),
            certificate_path=folder / f"{role}.pem",
            key_path=folder / f"{role}.key",
            token=_read(folder / f"{role}.token").decode(errors="replace").strip(),
            roles_by_token_digest=tokens,
        )
        _check_token(identity, folder)
        _check_pems(identity, folder)
        _check_certificate(identity)
        return identity


_identity: Identity | None = None


def use_identity(folder: Path | None, role: str) -> None:
    """Makes this process one of a role; with None, one that speaks plaintext.

    Raises:
        ValueError: a file is missing, or is not what it should be.
    """
    global _identity
    _identity = None if folder is None else Identity.load(folder, role)


def own_identity() -> Identity | None:
    """None: plaintext."""
    return _identity


def authorize(
    identity: Identity, method: str, metadata: Iterable[tuple[str, str | bytes]], certified_roles: Iterable[str]
) -> None:
    """Lets a call pass, or not.

    Args:
        identity: of the service that is called.
        method: full name, "/package.Service/Method".
        certified_roles: common names of the caller's certificate.

    Raises:
        UnauthenticatedError: it carries no token, an unknown one, or that of another role than its certificate's.
        ForbiddenError: its role may not call this.
    """
    carried = next((value for key, value in metadata if key == "authorization"), "")
    scheme, _, token = str(carried).partition(" ")
    if scheme != "Bearer" or not token:
        raise UnauthenticatedError("the call carries no token: expected that of a role, see rpc.trust")
    role = identity.roles_by_token_digest.get(bytes_digest(token.encode()))
    if role is None:
        raise UnauthenticatedError("the call carries a token that is not known here: is rpc.trust of another run?")
    if role not in certified_roles:
        raise UnauthenticatedError(
            f"the call carries the token of a {role} and the certificate of {' '.join(certified_roles) or 'nobody'}"
        )
    if (reason := why_not(role, method)) is not None:
        raise ForbiddenError(reason)


def why_not(role: str, method: str) -> str | None:
    """Why a role may not call a method; None when it may."""
    allowed = _MAY_CALL.get(method)
    if allowed is None or role in allowed:
        return None
    return f"role {role} may not call {method.rpartition('/')[2]}: only {' or '.join(sorted(allowed))} may"


def _read_tokens(path: Path) -> dict[str, str]:
    data = _read(path)
    try:
        tokens = object_of(data.decode())
    except ValueError as error:
        raise ValueError(f"rpc.trust: {path} is no JSON object: {error}") from error
    if not all(role in ROLES for role in tokens.values()):
        raise ValueError(f"rpc.trust: {path}: expected the digest of each token to one of {', '.join(ROLES)}")
    return tokens


def _check_token(identity: Identity, folder: Path) -> None:
    """Every call with one that is not known would be refused, and gRPC itself refuses what is no header."""
    path = folder / f"{identity.role}.token"
    if not re.fullmatch(r"[!-~]+", identity.token):
        raise ValueError(f"rpc.trust: {path}: expected one word of visible ASCII characters")
    if identity.roles_by_token_digest.get(bytes_digest(identity.token.encode())) != identity.role:
        raise ValueError(
            f"rpc.trust: {folder / 'tokens.json'} does not know {path.name} as the token of a {identity.role}: "
            f"expected its BLAKE3, hex, to {identity.role!r}"
        )


def _check_pems(identity: Identity, folder: Path) -> None:
    """Of files that do not fit gRPC says that it cannot listen; a key that it cannot read ends the process."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=identity.ca.decode())
    except (ssl.SSLError, ValueError) as error:
        raise ValueError(f"rpc.trust: {folder / 'ca.pem'}: expected a certificate, PEM: {error}") from error
    try:
        # With no password at all OpenSSL would ask at the terminal for one.
        context.load_cert_chain(identity.certificate_path, identity.key_path, password="")
    except ssl.SSLError as error:
        raise ValueError(
            f"rpc.trust: {identity.certificate_path} and {identity.key_path}: expected a certificate and its key, both "
            f"PEM, the key without a password: {error}"
        ) from error


def _check_certificate(identity: Identity) -> None:
    """No peer would take one that says something else."""
    from cryptography import x509

    certificate, path = x509.load_pem_x509_certificate(identity.certificate), identity.certificate_path
    names = [str(name.value) for name in certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)]
    if identity.role not in names:
        raise ValueError(
            f"rpc.trust: {path} is for {' '.join(names) or 'nobody'}: expected {identity.role!r} as its common name"
        )
    try:
        others = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        dns_names = others.get_values_for_type(x509.DNSName)
    except x509.ExtensionNotFound:
        dns_names = []
    if SERVER_NAME not in dns_names:
        raise ValueError(
            f"rpc.trust: {path} has DNS names {', '.join(dns_names) or 'none'}: expected {SERVER_NAME!r} among them"
        )
    now, since, until = datetime.now(UTC), certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if until < now:
        raise ValueError(f"rpc.trust: {path} has expired on {until:%Y-%m-%d %H:%M} UTC: make a new one")
    if since > now:
        raise ValueError(
            f"rpc.trust: {path} is valid from {since:%Y-%m-%d %H:%M} UTC on, and it is {now:%Y-%m-%d %H:%M} UTC here: "
            "set this machine's clock, or make a new one"
        )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"rpc.trust: cannot read {path} ({error.strerror}): `streamrl certs DIR` makes a folder"
        ) from error
