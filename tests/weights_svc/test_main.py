"""weights_svc as a process."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from streamrl import lifetime
from streamrl.digest import bytes_digest
from streamrl.rpc.channel import open_channel
from streamrl.rpc.chunks import cut
from streamrl.v1.weights_pb2 import (
    TRANSFER_FORMAT_FULL,
    FetchRequest,
    ListVersionsRequest,
    PublishFooter,
    PublishHeader,
    PublishRequest,
    TensorChunk,
    TensorInfo,
    WatchRequest,
)
from streamrl.v1.weights_pb2_grpc import WeightsServiceStub
from tests.weights_svc.running_service import DEADLINE_S, RUN_ID, free_address, make_data, publish_requests

MEBIBYTE = 2**20


class ServiceProcess:
    """`python -m weights_svc`, and a client of it."""

    def __init__(self, run_folder: Path) -> None:
        self.address = free_address()
        self.folder = run_folder / RUN_ID / "weights"
        self._settings = run_folder / "settings.json"
        self._settings.write_text(
            json.dumps({"run": {"id": RUN_ID, "dir": str(run_folder)}, "rpc": {"weights_address": self.address}})
        )
        self.start()

    def start(self) -> None:
        self.process = lifetime.spawn([sys.executable, "-m", "weights_svc", str(self._settings)])
        self.channel = open_channel(self.address)
        grpc.channel_ready_future(self.channel).result(DEADLINE_S)
        self.stub = WeightsServiceStub(self.channel)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.channel.close()

    def publish(self, requests: Iterator[PublishRequest]) -> str:
        digest: str = self.stub.Publish(requests, timeout=60).digest
        return digest

    def next_announcement(self) -> tuple[int, str]:
        announcement = next(self.stub.Watch(WatchRequest(run_id=RUN_ID), timeout=DEADLINE_S))
        return announcement.weight_version, announcement.digest

    def fetch(self, weight_version: int, digest: str) -> Iterator[TensorChunk]:
        request = FetchRequest(
            run_id=RUN_ID, receiver="test", weight_version=weight_version, digest=digest, format=TRANSFER_FORMAT_FULL
        )
        return (response.chunk for response in self.stub.Fetch(request, timeout=60))


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    service = ServiceProcess(tmp_path)
    try:
        yield service
    finally:
        service.kill()


def test_killed_in_the_middle_of_a_publish_it_comes_back_with_what_it_had_announced(service):
    digest = service.publish(iter(publish_requests(1, make_data(1))))
    begun = threading.Event()

    def half() -> Iterator[PublishRequest]:
        yield from publish_requests(2, make_data(2))[:4]
        begun.set()
        service.process.wait()

    call = service.stub.Publish.future(half(), timeout=DEADLINE_S)
    assert begun.wait(DEADLINE_S)
    while not list(service.folder.glob("*.partial")):
        time.sleep(0.01)
    service.kill()
    assert isinstance(call.exception(), grpc.RpcError)
    assert list(service.folder.glob("*.partial")) != []
    service.start()
    assert service.next_announcement() == (1, digest)
    assert list(service.folder.glob("*.partial")) == []
    data = [bytearray() for _ in range(3)]
    for chunk in service.fetch(1, digest):
        data[chunk.tensor_index] += chunk.data
    assert data == make_data(1)
    service.publish(iter(publish_requests(2, make_data(2))))
    assert service.next_announcement()[0] == 2


def test_its_memory_does_not_grow_with_the_version(service):
    num_bytes = 128 * MEBIBYTE
    row = bytes(range(256)) * (MEBIBYTE // 256)
    data = row * 128

    def requests() -> Iterator[PublishRequest]:
        tensor = TensorInfo(name="embed", dtype="F32", shape=[num_bytes // 4], num_bytes=num_bytes)
        yield PublishRequest(header=PublishHeader(run_id=RUN_ID, attempt=1, tensors=[tensor]))
        for _, offset, _ in cut([num_bytes], MEBIBYTE):
            yield PublishRequest(chunk=TensorChunk(tensor_index=0, offset=offset, data=row))
        yield PublishRequest(footer=PublishFooter(digests=[bytes_digest(data)]))

    most = before = anonymous_bytes(service.process.pid)
    digest = service.publish(requests())
    most = max(most, anonymous_bytes(service.process.pid))
    received = 0
    for chunk in service.fetch(0, digest):
        assert chunk.data == data[received : received + len(chunk.data)]
        received += len(chunk.data)
        if received % (16 * MEBIBYTE) == 0:
            most = max(most, anonymous_bytes(service.process.pid))
    assert received == num_bytes
    assert most - before < 64 * MEBIBYTE


def anonymous_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    [line] = [line for line in status if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


def test_it_uses_no_processor_while_it_waits(service):
    service.publish(iter(publish_requests(1, make_data(1))))
    watch = service.stub.Watch(WatchRequest(run_id=RUN_ID), timeout=DEADLINE_S)
    next(watch)
    process = psutil.Process(service.process.pid)
    process.cpu_percent()
    time.sleep(2)
    assert process.cpu_percent() < 2.0
    watch.cancel()


def test_it_ends_in_order_on_sigterm(service):
    watch = service.stub.Watch(WatchRequest(run_id=RUN_ID), timeout=DEADLINE_S)
    service.stub.ListVersions(ListVersionsRequest(run_id=RUN_ID), timeout=DEADLINE_S)
    service.process.send_signal(signal.SIGTERM)
    assert service.process.wait(DEADLINE_S) == 0
    with pytest.raises(grpc.RpcError):
        next(watch)


def run(settings: dict[str, object], tmp_path: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    path = tmp_path / "settings.json"
    path.write_text(json.dumps(settings))
    return subprocess.run(
        [sys.executable, "-m", "weights_svc", str(path), *arguments], capture_output=True, text=True, timeout=DEADLINE_S
    )


def test_a_port_in_use_is_bad_input(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = run({"run": {"id": "r", "dir": str(tmp_path)}, "rpc": {"weights_address": address}}, tmp_path)
    assert ended.returncode == 2 and f"cannot listen on {address}" in ended.stderr


@pytest.mark.parametrize("arguments", [(), ("--check",)])
def test_a_run_folder_that_cannot_be_made_is_bad_input(tmp_path, arguments):
    (tmp_path / "file").touch()
    ended = run({"run": {"id": "r", "dir": str(tmp_path / "file")}}, tmp_path, *arguments)
    assert ended.returncode == 2 and "run.dir: cannot make" in ended.stderr
    ended = run({"run": {"dir": str(tmp_path)}}, tmp_path, *arguments)
    assert ended.returncode == 2 and "run.id is empty" in ended.stderr
