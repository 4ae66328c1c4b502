"""Addresses of a run: free ports to take, and ports that others hold already."""

import errno
import random
import socket
from collections.abc import Collection

# Below the range that Linux gives to outgoing connections (32768 and up): such a port, once found free, is not taken by
# somebody's next connection before its service listens.
_FIRST_PORT = 20_000
_LAST_PORT = 31_999
_MAX_TRIES = 200


def free_port(host: str = "127.0.0.1", taken: Collection[int] = ()) -> int:
    """A port of `host` that nobody listens on, and that is not in `taken`.

    Raises:
        OSError: none was found, or the host is not this machine's.
    """
    # Not the run's seed: two runs with one seed must not meet on a port.
    chooser = random.SystemRandom()
    for _ in range(_MAX_TRIES):
        port = chooser.randint(_FIRST_PORT, _LAST_PORT)
        if port in taken:
            continue
        try:
            _try_to_listen(host, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            raise
        return port
    raise OSError(errno.EADDRINUSE, f"no free port on {host} between {_FIRST_PORT} and {_LAST_PORT}")


def why_not_listen(address: str) -> str | None:
    """Why no service of this machine could listen on "host:port" now; None when one could."""
    host, _, port = address.rpartition(":")
    try:
        _try_to_listen(host.strip("[]"), int(port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"port {port} is in use by another process"
        if error.errno == errno.EACCES:
            return f"port {port} needs privileges that this process does not have"
        return f"host {host} is not an address of this machine ({error.strerror or error})"
    return None


def _try_to_listen(host: str, port: int) -> None:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        # As servers do: a port whose last connections are still closing can be taken.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1)
