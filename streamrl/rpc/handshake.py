"""Says why two processes do not come to a connection: gRPC itself often knows no more than that the socket was closed.

Asks the peer once more, with Python's own TLS, which tells certificates that are foreign, expired or not accepted, and
plaintext against TLS.
"""

import re
import socket
import ssl
from datetime import UTC, datetime

from streamrl.rpc.trust import SERVER_NAME, Identity, own_identity

_TIMEOUT_S = 2.0
_SIGNS = re.compile(r"Socket closed|[Hh]andshake|SSL|recvmsg")
"""What gRPC says when a handshake may have failed."""


def why_no_handshake(address: str, details: str) -> str | None:
    """The reason, when the peer is there and certificates or their lack are what is wrong.

    Args:
        address: host:port.
        details: of gRPC's error. Blocks for a moment if they fit.
    """
    if not _SIGNS.search(details):
        return None
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _TIMEOUT_S) as connection:
            connection.settimeout(_TIMEOUT_S)
            return _without_identity(connection) if own_identity() is None else _with_identity(connection)
    except (OSError, ValueError):
        return None


def _without_identity(connection: socket.socket) -> str | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        context.wrap_socket(connection).close()
    except OSError:  # no TLS there, or nobody any more
        return None
    return "it speaks TLS and this process speaks plaintext: set rpc.trust here too"


def _with_identity(connection: socket.socket) -> str | None:
    identity = own_identity()
    assert identity is not None
    context = ssl.create_default_context(cadata=identity.ca.decode())
    context.load_cert_chain(identity.certificate_path, identity.key_path)
    context.set_alpn_protocols(["h2"])
    try:
        with context.wrap_socket(connection, server_hostname=SERVER_NAME) as secured:
            accepted = _speaks_first(secured)
    except ssl.SSLCertVerificationError as error:
        return f"its certificate does not pass here: {error.verify_message}"
    except ssl.SSLError as error:
        if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
            return "it speaks plaintext and this process speaks TLS: set rpc.trust there too"
        return None
    return None if accepted else f"it does not take the certificate of this {identity.role}: {_what_is_wrong(identity)}"


def _speaks_first(secured: ssl.SSLSocket) -> bool:
    """A gRPC server greets who has passed; one that does not like our certificate closes the connection only now."""
    try:
        return secured.recv(1) != b""
    except TimeoutError:
        return True
    except OSError:
        return False


def _what_is_wrong(identity: Identity) -> str:
    from cryptography import x509

    certificate = x509.load_pem_x509_certificate(identity.certificate)
    since, until = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if until < datetime.now(UTC):
        return f"it has expired on {until:%Y-%m-%d %H:%M} UTC"
    return (
        "it is signed by another authority than the peer's (is rpc.trust of another run?), or the peer's clock is not "
        f"between {since:%Y-%m-%d %H:%M} and {until:%Y-%m-%d %H:%M} UTC"
    )
