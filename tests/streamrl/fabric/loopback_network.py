"""A member process whose group meets over sockets on loopback instead of NCCL.

    python loopback_network.py [deaf | damaging | dying | blind]

deaf: never joins. damaging: what it receives is not what was sent. dying: ends with the first block. blind: finds no
device.
"""

import contextlib
import os
import socket
import sys
import threading

from streamrl.fabric.member_process import run

BLOCK_BYTES = 1000


class LoopbackNetwork:
    def __init__(self, flaw: str) -> None:
        if flaw == "blind":
            raise RuntimeError("no device here")
        self._flaw = flaw
        self._listening: dict[bytes, socket.socket] = {}

    def mint(self) -> bytes:
        listening = socket.create_server(("127.0.0.1", 0))
        unique_id = str(listening.getsockname()[1]).encode()
        self._listening[unique_id] = listening
        return unique_id

    def join(self, unique_id: bytes, rank: int, world_size: int) -> "LoopbackCommunicator":
        if self._flaw == "deaf":
            threading.Event().wait()
        if rank > 0:
            connection = socket.create_connection(("127.0.0.1", int(unique_id)))
            connection.sendall(bytes([rank]))
            # All have joined when rank 0 says so.
            assert connection.recv(1) == b"!"
            return LoopbackCommunicator([connection], is_sender=False, flaw=self._flaw)
        with self._listening.pop(unique_id) as listening:
            connections = [listening.accept()[0] for _ in range(1, world_size)]
        ranks = sorted(connection.recv(1)[0] for connection in connections)
        assert ranks == list(range(1, world_size)), f"ranks {ranks} of {world_size} have come"
        for connection in connections:
            connection.sendall(b"!")
        return LoopbackCommunicator(connections, is_sender=True, flaw="")


class LoopbackCommunicator:
    def __init__(self, connections: list[socket.socket], *, is_sender: bool, flaw: str) -> None:
        self.staging = memoryview(bytearray(BLOCK_BYTES))
        self._connections = connections
        self._is_sender = is_sender
        self._flaw = flaw

    def broadcast(self, num_bytes: int) -> None:
        if self._is_sender:
            for connection in self._connections:
                connection.sendall(self.staging[:num_bytes])
            return
        received = 0
        while received < num_bytes:
            more = self._connections[0].recv_into(self.staging[received:num_bytes])
            assert more, "rank 0 has gone"
            received += more
        if self._flaw == "damaging":
            self.staging[0] ^= 1
        elif self._flaw == "dying":
            os._exit(1)

    def leave(self) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.close()


if __name__ == "__main__":
    sys.exit(run(lambda: LoopbackNetwork(sys.argv[1] if len(sys.argv) > 1 else "")))
