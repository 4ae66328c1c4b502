"""A line between two sites that can stop, break and come back: a TCP forwarder on loopback."""

import contextlib
import socket
import threading
from collections.abc import Iterator

_BLOCK_BYTES = 4096


class Line:
    """Forwards connections to an address. What flows back from there can be held after some bytes."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Condition()
        self._may_pass: float = float("inf")
        self._broken = False
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.num_bytes = 0
        """Came back so far."""
        self.flips = 0
        """So many of the next blocks come back with one bit changed."""
        threading.Thread(target=self._accept, daemon=True).start()

    def hold_after(self, num_bytes: float) -> None:
        """Lets so many more bytes back."""
        with self._lock:
            self._may_pass = self.num_bytes + num_bytes
            self._lock.notify_all()

    def release(self) -> None:
        self.hold_after(float("inf"))

    def wait_held(self, timeout_s: float = 20.0) -> None:
        """Until as much has come back as may."""
        with self._lock:
            assert self._lock.wait_for(lambda: self.num_bytes >= self._may_pass, timeout_s)

    def break_now(self) -> None:
        """Ends all connections, and refuses new ones."""
        with self._lock:
            self._broken = True
        self._end_all()

    def mend(self) -> None:
        """Takes connections again; nothing is held."""
        with self._lock:
            self._broken = False
        self.release()

    def close(self) -> None:
        self.release()
        self._listener.close()
        self._end_all()

    def _end_all(self) -> None:
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._lock.notify_all()

    def _accept(self) -> None:
        for near in self._connections():
            if self._broken:
                near.close()
                continue
            far = socket.create_connection(self._target)
            self._pairs.append((near, far))
            threading.Thread(target=self._pump, args=(near, far, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, True), daemon=True).start()

    def _connections(self) -> Iterator[socket.socket]:
        with contextlib.suppress(OSError):
            while True:
                yield self._listener.accept()[0]

    def _pump(self, source: socket.socket, sink: socket.socket, back: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_BLOCK_BYTES):
                if back:
                    with self._lock:
                        self._lock.wait_for(lambda: self.num_bytes < self._may_pass)
                        self.num_bytes += len(data)
                        if self.flips > 0 and len(data) == _BLOCK_BYTES:
                            self.flips -= 1
                            data = data[:2000] + bytes([data[2000] ^ 16]) + data[2001:]
                        self._lock.notify_all()
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
