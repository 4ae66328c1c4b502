"""A line between two sites on one machine: another network namespace, behind two TUN devices whose packets are
forwarded with a delay and at a limited rate. Needs root and iproute2.
"""

import ctypes
import fcntl
import os
import queue
import select
import struct
import subprocess
import threading
import time
from pathlib import Path

NEAR_HOST, FAR_HOST = "10.201.7.1", "10.201.7.2"
_MTU = 60_000
_TUNSETIFF = 0x400454CA
_TUN_WITHOUT_HEADER = 0x1001
_LOOK_S = 0.2
"""An idle direction looks so often whether it is to end."""
_QUEUE_BYTES = 4 * 2**20
"""What a router would hold: packets beyond are lost."""


class SlowLine:
    """Between this namespace (NEAR_HOST) and a new one (FAR_HOST), as long as it is open."""

    def __init__(self, *, bytes_per_s: float, round_trip_s: float) -> None:
        self._name = f"streamrl-{os.getpid()}"
        self.in_far_namespace = ["ip", "netns", "exec", self._name]
        """Before a command that is to run at the far side."""
        _ip("netns", "add", self._name)
        try:
            near = _open_tun(f"near{os.getpid()}", NEAR_HOST, FAR_HOST, None)
            far = _open_tun(f"far{os.getpid()}", FAR_HOST, NEAR_HOST, self._name)
            self._devices = (near, far)
            _ip("-n", self._name, "link", "set", "lo", "up")
            self.to_far = _Way(near, far, bytes_per_s, round_trip_s / 2)
            self.to_near = _Way(far, near, bytes_per_s, round_trip_s / 2)
        except BaseException:
            _ip("netns", "delete", self._name)
            raise

    def __enter__(self) -> "SlowLine":
        return self

    def __exit__(self, *_error: object) -> None:
        for way in (self.to_far, self.to_near):
            way.stop()
        for device in self._devices:
            os.close(device)
        _ip("netns", "delete", self._name)


class _Way:
    """One direction."""

    def __init__(self, source: int, sink: int, bytes_per_s: float, delay_s: float) -> None:
        self._source, self._sink = source, sink
        self._bytes_per_s, self._delay_s = bytes_per_s, delay_s
        self._waiting: queue.Queue[tuple[float, bytes] | None] = queue.Queue()
        self._free_s = 0.0
        self._open = True
        self.num_bytes = 0
        """On the interface so far, with all headers and what was sent again."""
        os.set_blocking(source, False)
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._take, self._give)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Nothing is carried any more. The devices are the line's to close."""
        self._open = False
        self._waiting.put(None)
        for thread in self._threads:
            thread.join()

    def _take(self) -> None:
        while self._open:
            try:
                packet = os.read(self._source, _MTU + 100)
            except BlockingIOError:
                select.select([self._source], [], [], _LOOK_S)
                continue
            except OSError:  # the device is down
                return
            now = time.monotonic()
            self._free_s = max(self._free_s, now)
            if (self._free_s - now) * self._bytes_per_s > _QUEUE_BYTES:
                continue
            self.num_bytes += len(packet)
            self._free_s += len(packet) / self._bytes_per_s
            self._waiting.put((self._free_s + self._delay_s, packet))

    def _give(self) -> None:
        while self._open:
            if (waiting := self._waiting.get()) is None:
                return
            due_s, packet = waiting
            time.sleep(max(due_s - time.monotonic(), 0))
            try:
                os.write(self._sink, packet)
            except OSError:  # the device is down
                return


def _open_tun(name: str, host: str, peer: str, namespace: str | None) -> int:
    """A TUN device in a namespace, up; its file."""
    opened: list[int | OSError] = []

    def open_here() -> None:
        try:
            if namespace is not None:
                _enter(namespace)
            file = os.open("/dev/net/tun", os.O_RDWR)
            fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH", name[:15].encode(), _TUN_WITHOUT_HEADER))
            opened.append(file)
        except OSError as error:
            opened.append(error)

    # A namespace is a thread's: this one ends in it.
    thread = threading.Thread(target=open_here)
    thread.start()
    thread.join()
    (file,) = opened
    if isinstance(file, OSError):
        raise file
    there = () if namespace is None else ("-n", namespace)
    _ip(*there, "addr", "add", f"{host}/32", "peer", peer, "dev", name[:15])
    _ip(*there, "link", "set", name[:15], "mtu", str(_MTU), "up")
    return file


def _enter(namespace: str) -> None:
    file = os.open(Path("/run/netns") / namespace, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(file, 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {namespace}")
    finally:
        os.close(file)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
