"""`streamrl certs DIR`: an authority of one's own, and a certificate and a token for each role, for trials.

The authority's key is written once and needed only to make more certificates: keep it away from the services. Clusters
that have an authority bring their own files, laid out in the same way (streamrl/rpc/trust.py).
"""

import json
import os
import secrets
from argparse import Namespace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from streamrl.command.report import EXIT_COMPLETED, write_error, write_json
from streamrl.digest import bytes_digest
from streamrl.rpc.trust import ROLES, SERVER_NAME

_CLOCK_SKEW = timedelta(minutes=5)
_LONGEST_DAYS = 3650


class Authority:
    """Signs certificates."""

    def __init__(self, days: float) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "StreamRL trial authority")])
        self.certificate = (
            self._builder(self._name, self._key.public_key(), days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def key_pem(self) -> bytes:
        return _key_pem(self._key)

    def issue(self, role: str, *, days: float) -> tuple[bytes, bytes]:
        """Certificate and key for a role, PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, role)])
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            self._builder(name, key.public_key(), days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM), _key_pem(key)

    def _builder(self, name: x509.Name, key: ec.EllipticCurvePublicKey, days: float) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        until = now + timedelta(days=days)
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(min(now, until) - _CLOCK_SKEW)
            .not_valid_after(until)
        )


def certs(arguments: Namespace) -> int:
    """
    Raises:
        ValueError: the folder has certificates already, or cannot be written.
    """
    folder: Path = arguments.folder
    if not 0 < arguments.days <= _LONGEST_DAYS:
        raise ValueError(f"--days is {arguments.days:g}: expected more than 0, and {_LONGEST_DAYS} at most")
    make_trust(folder, days=arguments.days)
    if arguments.json:
        write_json({"status": "completed", "folder": str(folder), "roles": list(ROLES), "days": arguments.days})
    else:
        write_error(
            f"{folder}: for {', '.join(ROLES)}, {arguments.days:g} days. Set rpc.trust to it; a service on another "
            f"machine needs ca.pem, tokens.json and the three files of its own role, and nobody needs ca.key to run"
        )
    return EXIT_COMPLETED


def make_trust(folder: Path, *, days: float) -> None:
    """Writes the folder.

    Raises:
        ValueError: it has certificates already, or cannot be written.
    """
    if (folder / "ca.pem").exists():
        raise ValueError(f"{folder} has certificates already: choose another folder, or remove it to begin anew")
    authority = Authority(days)
    tokens = {role: secrets.token_urlsafe(32) for role in ROLES}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_secret(folder / "ca.key", authority.key_pem())
        (folder / "ca.pem").write_bytes(authority.certificate_pem())
        for role, token in tokens.items():
            certificate, key = authority.issue(role, days=days)
            (folder / f"{role}.pem").write_bytes(certificate)
            _write_secret(folder / f"{role}.key", key)
            _write_secret(folder / f"{role}.token", token.encode())
        digests = {bytes_digest(token.encode()): role for role, token in tokens.items()}
        (folder / "tokens.json").write_text(json.dumps(digests, indent=2))
    except OSError as error:
        raise ValueError(f"cannot write {folder}: {error}") from error


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write_secret(path: Path, content: bytes) -> None:
    """Readable by its owner alone, from the first byte on."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
