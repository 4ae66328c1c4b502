"""The publisher against a real weights_svc."""

import json
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch
from safetensors import safe_open

from streamrl import lifetime
from streamrl.digest import bytes_digest, version_digest
from streamrl.errors import PublishError, StaleAttemptError
from streamrl.rpc.channel import open_channel
from streamrl.v1.weights_pb2 import (
    TRANSFER_FORMAT_FULL,
    Adapter,
    Canary,
    FetchRequest,
    ListVersionsRequest,
    ModelFile,
    NegotiateRequest,
    NegotiateResponse,
    VersionManifest,
)
from streamrl.v1.weights_pb2_grpc import WeightsServiceStub
from tests.weights_svc.running_service import DEADLINE_S, RUN_ID, free_address
from trainer_svc.publisher import Publisher, Snapshot
from trainer_svc.snapshots import AdapterVersions

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]


class WeightsProcess:
    """`python -m weights_svc`, and a receiver's client of it."""

    def __init__(self, run_folder: Path) -> None:
        self.address = free_address()
        self.folder = run_folder / RUN_ID / "weights"
        self._settings = run_folder / "settings.json"
        self._settings.write_text(
            json.dumps({"run": {"id": RUN_ID, "dir": str(run_folder)}, "rpc": {"weights_address": self.address}})
        )
        self.start()

    def start(self) -> None:
        self._process = lifetime.spawn([sys.executable, "-m", "weights_svc", str(self._settings)])
        self._channel = open_channel(self.address)
        grpc.channel_ready_future(self._channel).result(DEADLINE_S)
        self._stub = WeightsServiceStub(self._channel)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._channel.close()

    def negotiate(self, with_files: bool = False) -> NegotiateResponse:
        request = NegotiateRequest(
            run_id=RUN_ID, attempt=9, receiver="test", formats=[TRANSFER_FORMAT_FULL], with_files=with_files
        )
        return self._stub.Negotiate(request, timeout=DEADLINE_S)

    def fetch(self, plan: NegotiateResponse) -> list[bytes]:
        request = FetchRequest(
            run_id=RUN_ID,
            receiver="test",
            weight_version=plan.manifest.weight_version,
            digest=plan.manifest.digest,
            format=plan.format,
        )
        data = [b""] * len(plan.manifest.tensors)
        for response in self._stub.Fetch(request, timeout=DEADLINE_S):
            data[response.chunk.tensor_index] += response.chunk.data
        return data


@pytest.fixture
def weights(tmp_path: Path) -> Iterator[WeightsProcess]:
    weights = WeightsProcess(tmp_path)
    try:
        yield weights
    finally:
        weights.kill()


@pytest.fixture
def publisher(weights: WeightsProcess) -> Iterator[Publisher]:
    publisher = make_publisher(weights.address)
    try:
        yield publisher
    finally:
        publisher.close()


def make_publisher(address: str, *, attempt: int = 1, patience_s: float = 30.0) -> Publisher:
    return Publisher(address, RUN_ID, attempt, chunk_bytes=4096, deadline_s=DEADLINE_S, patience_s=patience_s)


def snapshot(weight_version: int, **others: object) -> Snapshot:
    tensors = [("embed", torch.full((50, 100), float(weight_version))), ("norm", torch.ones(100))]
    return Snapshot(weight_version, tensors, **others)  # type: ignore[arg-type]


def held_versions(weights: WeightsProcess) -> list[VersionManifest]:
    with open_channel(weights.address) as channel:
        held = WeightsServiceStub(channel).ListVersions(ListVersionsRequest(run_id=RUN_ID), timeout=DEADLINE_S)
    return list(held.versions)


def data_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_tensors_of_every_dtype_and_shape_arrive_bit_for_bit(weights, publisher):
    drawn = torch.randint(0, 2, (7, 33))
    tensors = [(str(dtype), drawn.to(dtype)) for dtype in DTYPES]
    tensors += [
        ("scalar", torch.tensor(3.5, dtype=torch.bfloat16)),
        ("empty", torch.empty(0, 4)),
        ("transposed", torch.arange(12.0).reshape(3, 4).T),
        ("slice", torch.arange(20.0).reshape(4, 5)[1:3]),
        ("parameter", torch.nn.Parameter(torch.randn(1000, 11))),
        ("nan", torch.tensor([float("nan"), -0.0, float("inf")])),
    ]
    publication = publisher.publish(Snapshot(0, tensors))
    plan = weights.negotiate()
    assert weights.fetch(plan) == [data_of(tensor.detach()) for _, tensor in tensors]
    assert publication.digest == plan.manifest.digest == version_digest(plan.manifest.tensors)
    assert publication.num_bytes == plan.transfer_bytes
    assert [tensor.digest for tensor in plan.manifest.tensors] == [
        bytes_digest(data_of(tensor.detach())) for _, tensor in tensors
    ]
    [path] = weights.folder.glob("*.safetensors")
    with safe_open(path, framework="pt") as file:
        for name, tensor in tensors:
            assert data_of(file.get_tensor(name)) == data_of(tensor.detach())
            assert file.get_tensor(name).shape == tensor.shape


def test_files_and_canaries_come_with_a_version(weights, publisher):
    files = [ModelFile(name="config.json", content=b"{}")]
    canaries = [Canary(token_ids=[1, 2, 3], logprobs=[-0.25, -0.5])]
    publisher.publish(snapshot(0, files=files, canaries=canaries))
    plan = weights.negotiate(with_files=True)
    assert list(plan.files) == files and list(plan.manifest.canaries) == canaries


def test_versions_are_published_in_the_background_in_order(weights, publisher):
    for version in range(4):
        publisher.submit(snapshot(version))
    publisher.wait()
    publications = publisher.take_publications()
    assert [publication.weight_version for publication in publications] == [0, 1, 2, 3]
    assert all(publication.num_bytes == 20400 and publication.publish_s > 0 for publication in publications)
    assert publisher.take_publications() == []
    assert weights.negotiate().manifest.weight_version == 3


def test_a_second_snapshot_waits_while_one_is_unsent(weights, publisher):
    weights.kill()
    publisher.submit(snapshot(0))
    second = threading.Thread(target=publisher.submit, args=(snapshot(1),))
    second.start()
    second.join(0.5)
    assert second.is_alive()
    weights.start()
    second.join(DEADLINE_S)
    assert not second.is_alive()
    publisher.wait()
    assert weights.negotiate().manifest.weight_version == 1


def test_a_publish_survives_that_the_service_is_killed_in_its_middle(weights, publisher):
    large = [("embed", torch.randn(8_000_000))]
    publisher.submit(Snapshot(0, large))
    while not list(weights.folder.glob("*.partial")):
        publisher.check()
    weights.kill()
    weights.start()
    publisher.wait()
    plan = weights.negotiate()
    assert weights.fetch(plan) == [data_of(large[0][1])]


def test_publishing_again_after_a_restart_is_harmless(weights, publisher):
    first = publisher.publish(snapshot(3))
    weights.kill()
    weights.start()
    assert publisher.publish(snapshot(3)).digest == first.digest


def test_a_service_that_stays_away_is_a_publish_error_after_the_patience(caplog):
    publisher = make_publisher(free_address(), patience_s=0.5)
    with caplog.at_level(logging.WARNING):
        publisher.submit(snapshot(0))
        for ask in (publisher.wait, publisher.check, lambda: publisher.submit(snapshot(1))):
            with pytest.raises(PublishError, match=r"version 0 cannot .* does not answer"):
                ask()
    assert "is not published yet, trying again" in caplog.text
    publisher.close()


def test_a_refusal_is_a_publish_error_at_once(publisher):
    publisher.publish(snapshot(3))
    publisher.submit(Snapshot(3, [("other", torch.ones(5))]))
    with pytest.raises(PublishError, match="a version never changes within an attempt"):
        publisher.wait()


def test_a_base_is_published_once_over_attempts(weights, publisher, caplog):
    publisher.submit(snapshot(0, is_base=True))
    publisher.wait()
    [publication] = publisher.take_publications()
    assert publisher.base_digest == publication.digest
    adapter = Adapter(base_weight_version=0, base_digest=publisher.base_digest, scaling=2.0)
    publisher.publish(snapshot(3, adapter=adapter))
    second = make_publisher(weights.address, attempt=2)
    assert second.rewind(3) == {0, 3}
    second.provide_base(snapshot(0, is_base=True))
    assert second.base_digest == publication.digest
    assert [manifest.attempt for manifest in held_versions(weights)] == [1, 1]
    # One that is not there any more, or not marked as such, or another.
    [path] = weights.folder.glob("version-00000000-*.safetensors")
    weights.kill()
    path.unlink()
    weights.start()
    second.provide_base(snapshot(0, is_base=True))
    assert [(manifest.weight_version, manifest.attempt) for manifest in held_versions(weights)] == [(0, 2), (3, 1)]
    second.close()
    third = make_publisher(weights.address, attempt=3)
    third.rewind(3)
    with caplog.at_level(logging.WARNING):
        third.provide_base(Snapshot(0, [("embed", torch.zeros(5))], is_base=True))
    assert "model.path has other files now" in caplog.text
    assert held_versions(weights)[0].digest == third.base_digest != publication.digest
    third.close()


@pytest.mark.parametrize("noticed_by", ["wait", "check"])
def test_a_base_that_was_lost_is_published_again(weights, publisher, caplog, noticed_by):
    made_by: list[threading.Thread] = []

    class Source:
        def weights(self, form: str = "merged") -> list[tuple[str, torch.Tensor]]:
            made_by.append(threading.current_thread())
            return [(form, torch.ones(1))]

    versions = AdapterVersions(Source(), publisher, 2.0)
    for version in (0, 1):
        publisher.submit(versions.take(version, (), ()))
        publisher.wait()
    [path] = weights.folder.glob("version-00000000-*.safetensors")
    weights.kill()
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    weights.start()
    with caplog.at_level(logging.WARNING):
        publisher.submit(versions.take(2, (), ()))
        while noticed_by == "check" and [held.weight_version for held in held_versions(weights)] != [0, 1, 2]:
            publisher.check()
        publisher.wait()
    assert "has lost what adapters are added to" in caplog.text
    assert [(held.weight_version, held.is_base) for held in held_versions(weights)] == [
        (0, True),
        (1, False),
        (2, False),
    ]
    assert set(made_by) == {threading.main_thread()}


def test_closing_gives_up_what_waits_for_its_base(weights, publisher):
    publisher.make_base = lambda: snapshot(0, is_base=True)
    lost = Adapter(base_weight_version=0, base_digest="lost", scaling=2.0)
    publisher.submit(snapshot(1, adapter=lost))
    with publisher._changed:
        publisher._changed.wait_for(lambda: publisher._waits_for_base)
    publisher.close()
    with pytest.raises(PublishError):
        publisher.check()


def test_a_process_of_an_earlier_attempt_is_refused(weights, publisher):
    later = make_publisher(weights.address, attempt=2)
    for version in (1, 2, 3):
        publisher.publish(snapshot(version))
    assert later.rewind(2) == {1, 2}
    assert [manifest.weight_version for manifest in held_versions(weights)] == [1, 2]
    later.close()
    with pytest.raises(PublishError, match="attempt 1 is over"):
        publisher.publish(snapshot(3))
    with pytest.raises(StaleAttemptError):
        publisher.rewind(0)


def test_a_snapshot_that_cannot_be_sent_is_a_value_error(publisher):
    with pytest.raises(ValueError, match=r"x has dtype torch\.complex64"):
        publisher.publish(Snapshot(0, [("x", torch.ones(2, dtype=torch.complex64))]))
    with pytest.raises(ValueError, match="x is on meta: expected a snapshot on the CPU"):
        publisher.publish(Snapshot(0, [("x", torch.ones(2, device="meta"))]))


def test_the_trainer_learns_of_a_snapshot_that_cannot_be_sent_in_the_background(publisher):
    publisher.submit(Snapshot(0, [("x", torch.ones(2, device="meta"))]))
    with pytest.raises(PublishError, match="x is on meta"):
        publisher.wait()


def test_closing_gives_up_what_is_unsent():
    publisher = make_publisher(free_address(), patience_s=1000.0)
    publisher.submit(snapshot(0))
    publisher.close()
    with pytest.raises(PublishError):
        publisher.check()
