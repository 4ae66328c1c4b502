"""weights_svc as tests run it, and versions to publish to it."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import grpc

from generator_svc.version_buffer import VersionBuffer
from streamrl.digest import bytes_digest
from streamrl.fabric.member import COMMAND
from streamrl.rpc.channel import open_channel
from streamrl.rpc.chunks import cut
from streamrl.v1.weights_pb2 import (
    TRANSFER_FORMAT_FULL,
    AcknowledgeRequest,
    Adapter,
    Canary,
    FetchRequest,
    ListVersionsRequest,
    ListVersionsResponse,
    ModelFile,
    NegotiateRequest,
    NegotiateResponse,
    PublishFooter,
    PublishHeader,
    PublishRequest,
    RewindRequest,
    TensorChunk,
    TensorInfo,
    WatchRequest,
)
from streamrl.v1.weights_pb2_grpc import WeightsServiceStub
from weights_svc.main import folder_of, serve
from weights_svc.settings import WeightsServiceSettings

RUN_ID = "test-run"
DEADLINE_S = 60.0


def make_data(weight_version: int, num_items: int = 1000) -> list[bytes]:
    """The data of a version of three tensors: float32, empty, bfloat16."""
    return [bytes([weight_version + 1, 2, 3, 4]) * num_items, b"", bytes([weight_version + 1, 5]) * (num_items // 2)]


def tensor_infos(data: Sequence[bytes]) -> list[TensorInfo]:
    first, empty, last = data
    return [
        TensorInfo(name="embed", dtype="F32", shape=[len(first) // 4], num_bytes=len(first)),
        TensorInfo(name="empty", dtype="F32", shape=[0, 3], num_bytes=len(empty)),
        TensorInfo(name="head", dtype="BF16", shape=[len(last) // 2], num_bytes=len(last)),
    ]


def publish_requests(
    weight_version: int,
    data: Sequence[bytes],
    *,
    attempt: int = 1,
    files: Sequence[ModelFile] = (),
    canaries: Sequence[Canary] = (),
    adapter: Adapter | None = None,
    is_base: bool = False,
    chunk_bytes: int = 700,
) -> list[PublishRequest]:
    """A whole publish as the generated classes send it."""
    header = PublishHeader(
        run_id=RUN_ID,
        attempt=attempt,
        weight_version=weight_version,
        tensors=tensor_infos(data),
        files=files,
        canaries=canaries,
        adapter=adapter,
        is_base=is_base,
    )
    chunks = [
        TensorChunk(tensor_index=index, offset=offset, data=data[index][offset : offset + num_bytes])
        for index, offset, num_bytes in cut([len(tensor) for tensor in data], chunk_bytes)
    ]
    return [
        PublishRequest(header=header),
        *(PublishRequest(chunk=chunk) for chunk in chunks),
        PublishRequest(footer=PublishFooter(digests=[bytes_digest(tensor) for tensor in data])),
    ]


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class RunningService:
    """A real service on loopback, in a thread of this process, and a client of it."""

    def __init__(
        self,
        run_folder: Path,
        *,
        keep_versions: int = 3,
        chunk_bytes: int = 4096,
        upstream: str | None = None,
        site: str = "",
        anchor_every: int = 100,
        max_bytes_per_s: float = 0.0,
        fabric: str = "",
        member_command: Sequence[str] = COMMAND,
    ) -> None:
        self._member_command = member_command
        self.settings = WeightsServiceSettings.model_validate(
            {
                "run": {"id": RUN_ID, "dir": run_folder, "site": site},
                "rpc": {"weights_address": free_address()},
                "weights": {
                    "keep_versions": keep_versions,
                    "chunk_bytes": chunk_bytes,
                    "upstream": upstream,
                    "anchor_every": anchor_every,
                    "max_bytes_per_s": max_bytes_per_s,
                    "fabric": fabric,
                },
            }
        )
        self.address = self.settings.rpc.weights_address
        self.folder = folder_of(self.settings)
        self._thread: threading.Thread | None = None
        self.start()

    def start(self) -> None:
        ready = threading.Event()

        async def run() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            ready.set()
            await serve(self.settings, "weights_svc", self._stop, self._member_command)

        self._thread = threading.Thread(target=lambda: asyncio.run(run()))
        self._thread.start()
        assert ready.wait(DEADLINE_S)
        self.channel = open_channel(self.address)
        grpc.channel_ready_future(self.channel).result(DEADLINE_S)
        self.stub = WeightsServiceStub(self.channel)

    def ask_to_stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)

    def stop(self) -> None:
        if self._thread is not None:
            if self._thread.is_alive():
                self.ask_to_stop()
            self._thread.join()
            self._thread = None
            self.channel.close()

    def publish(self, weight_version: int, data: Sequence[bytes] | None = None, **header: object) -> str:
        """Publishes a version; its digest."""
        data = make_data(weight_version) if data is None else data
        requests = publish_requests(weight_version, data, **header)  # type: ignore[arg-type]
        return self.send(requests)

    def send(self, requests: Sequence[PublishRequest]) -> str:
        digest: str = self.stub.Publish(iter(requests), timeout=DEADLINE_S).digest
        return digest

    def negotiate(self, receiver: str = "generator-0", attempt: int = 1, **wishes: object) -> NegotiateResponse:
        wishes = {"formats": [TRANSFER_FORMAT_FULL], **wishes}
        request = NegotiateRequest(run_id=RUN_ID, attempt=attempt, receiver=receiver, **wishes)  # type: ignore[arg-type]
        return self.stub.Negotiate(request, timeout=DEADLINE_S)

    def fetch(self, weight_version: int, digest: str, **position: object) -> "Iterator[TensorChunk]":
        """The chunks of a fetch, as they come."""
        request: dict[str, object] = {"receiver": "generator-0", "format": TRANSFER_FORMAT_FULL, **position}
        call = self.stub.Fetch(
            FetchRequest(run_id=RUN_ID, weight_version=weight_version, digest=digest, **request),  # type: ignore[arg-type]
            timeout=DEADLINE_S,
        )
        return (response.chunk for response in call)

    def fetch_all(self, weight_version: int, digest: str, num_tensors: int = 3) -> list[bytes]:
        """The data of each tensor. As an instance does, it begins again while the service says that a version which it
        relays has just arrived as a whole."""
        while True:
            data = [bytearray() for _ in range(num_tensors)]
            try:
                for chunk in self.fetch(weight_version, digest):
                    assert chunk.offset == len(data[chunk.tensor_index])
                    data[chunk.tensor_index] += chunk.data
            except grpc.RpcError as error:
                if "it has just arrived" not in error.details():
                    raise
            else:
                return [bytes(tensor) for tensor in data]

    def acknowledge(self, weight_version: int, digest: str, receiver: str = "generator-0", attempt: int = 1) -> None:
        request = AcknowledgeRequest(
            run_id=RUN_ID, attempt=attempt, receiver=receiver, weight_version=weight_version, digest=digest, fetch_s=0.5
        )
        self.stub.Acknowledge(request, timeout=DEADLINE_S)

    def rewind(self, weight_version: int, attempt: int) -> list[int]:
        request = RewindRequest(run_id=RUN_ID, attempt=attempt, weight_version=weight_version)
        return list(self.stub.Rewind(request, timeout=DEADLINE_S).forgotten_weight_versions)

    def watch(self) -> "Iterator[tuple[int, int]]":
        """(weight version, attempt) of each announcement."""
        call = self.stub.Watch(WatchRequest(run_id=RUN_ID, watcher="test"), timeout=DEADLINE_S)
        return ((announcement.weight_version, announcement.attempt) for announcement in call)

    def list_versions(self) -> ListVersionsResponse:
        return self.stub.ListVersions(ListVersionsRequest(run_id=RUN_ID), timeout=DEADLINE_S)

    def versions(self) -> list[int]:
        return [manifest.weight_version for manifest in self.list_versions().versions]

    def wait_for_versions(self, expected: list[int]) -> None:
        """Retirement comes a moment after what causes it."""
        wait_until(lambda: self.versions() == expected)

    def wait_for_files(self, num_versions: int) -> None:
        """So many versions lie in the folder, and nothing partial. Files go a moment after their cause, too."""
        expected = num_versions * [".manifest"] + num_versions * [".safetensors"]
        wait_until(lambda: sorted(path.suffix for path in self.folder.glob("version-*")) == expected)


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def content_of(buffer: VersionBuffer) -> list[bytes]:
    """The data of each tensor."""
    content = []
    for index in range(len(buffer.manifest.tensors)):
        with buffer.tensor_bytes(index) as data:
            content.append(bytes(data))
    return content
