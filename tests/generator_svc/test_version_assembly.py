"""A version put together from differences to one that is kept, as a real weights_svc sends them."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from generator_svc.prefetcher import Prefetcher
from generator_svc.version_assembly import VersionAssembly
from generator_svc.version_buffer import VersionBuffer
from generator_svc.weight_fetcher import WeightSource
from streamrl.delta_codec import encode_delta
from streamrl.digest import bytes_digest, version_digest
from streamrl.errors import WeightTransferError
from streamrl.rpc.chunks import FetchedChunk, Stretch
from streamrl.v1.weights_pb2 import CHUNK_ENCODING_SPARSE_DELTA, TensorInfo, VersionManifest
from tests.weights_svc.running_service import RUN_ID, RunningService, content_of

OLD = {"frozen": b"\1\2\3\4" * 50, "trained": bytes(4000), "gone": b"12345678"}
NEW = {"frozen": OLD["frozen"], "trained": bytes(100) + b"\7" + bytes(3899), "fresh": b"abcd"}


def manifest_of(version: int, tensors: dict[str, bytes]) -> VersionManifest:
    infos = [
        TensorInfo(name=name, dtype="BF16", shape=[len(data) // 2], num_bytes=len(data), digest=bytes_digest(data))
        for name, data in tensors.items()
    ]
    return VersionManifest(weight_version=version, tensors=infos, digest=version_digest(infos))


@pytest.fixture
def base() -> Iterator[VersionBuffer]:
    buffer = VersionBuffer(manifest_of(1, OLD))
    for index, data in enumerate(OLD.values()):
        buffer.write(index, 0, data)
    yield buffer
    buffer.close()


@pytest.fixture
def buffer() -> Iterator[VersionBuffer]:
    buffer = VersionBuffer(manifest_of(2, NEW))
    yield buffer
    buffer.close()


def difference() -> FetchedChunk:
    encoding, data = encode_delta(OLD["trained"], NEW["trained"], 2)
    assert encoding == CHUNK_ENCODING_SPARSE_DELTA
    return FetchedChunk(Stretch(1, 0, 4000), encoding, data)


def test_what_is_the_same_comes_from_the_base_and_what_is_new_as_it_is(base: VersionBuffer, buffer: VersionBuffer):
    assembly = VersionAssembly(buffer, base)
    assembly.add(difference())
    assembly.add(FetchedChunk(Stretch(2, 0, 4), 0, NEW["fresh"]))
    assembly.finish_difference()
    assert assembly.complete
    for index, data in enumerate(NEW.values()):
        with buffer.tensor_bytes(index) as arrived:
            assert arrived == data


def test_a_base_that_is_not_what_it_was_is_told(base: VersionBuffer, buffer: VersionBuffer):
    base.write(1, 300, b"\1")
    assembly = VersionAssembly(buffer, base)
    with pytest.raises(WeightTransferError, match="trained"):
        assembly.add(difference())
    assert (assembly.tensor_index, assembly.offset) == (1, 4000)
    assembly.take_tensor_again()
    assembly.add(FetchedChunk(Stretch(1, 0, 4000), 0, NEW["trained"]))
    assert assembly.tensor_index == 2


@pytest.mark.parametrize(
    "chunk",
    [FetchedChunk(Stretch(2, 0, 4), CHUNK_ENCODING_SPARSE_DELTA, b""), FetchedChunk(Stretch(2, 0, 4), 0, b"abc")],
)
def test_a_chunk_that_makes_no_sense_is_an_error(base: VersionBuffer, buffer: VersionBuffer, chunk: FetchedChunk):
    assembly = VersionAssembly(buffer, base)
    assembly.add(difference())
    with pytest.raises(WeightTransferError):
        assembly.add(chunk)


def test_an_instance_that_keeps_its_base_fetches_what_differs(tmp_path: Path):
    service = RunningService(tmp_path)

    async def main() -> list[list[bytes]]:
        source = WeightSource(service.address, RUN_ID, attempt=1, receiver="g", site="", keep_base=True)
        prefetcher, arrived = Prefetcher(source), []
        for version in range(3):
            service.publish(version, versions[version])
            fetched = await prefetcher.take(service.negotiate(exact_weight_version=version).manifest)
            arrived.append(content_of(fetched.buffer))
            fetched.buffer.close()
        prefetcher.close()
        return arrived

    changing = [bytes([version]) + bytes(3999) for version in range(3)]
    versions = [[data, b"", bytes(range(250)) * 8] for data in changing]
    try:
        assert asyncio.run(main()) == versions
        traffic = service.list_versions()
        assert traffic.bytes_full == 3 * 6000
        assert traffic.bytes_sent < 6000 + 200
    finally:
        service.stop()
