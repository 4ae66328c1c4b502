"""A version arrives whole, or not at all."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import deserialize

from streamrl.digest import bytes_digest, version_digest
from streamrl.errors import RefusedError, WeightTransferError
from streamrl.rpc.chunks import Stretch, cut
from streamrl.v1.weights_pb2 import PublishFooter, PublishHeader, TensorInfo
from weights_svc.incoming import ChunkOrder, IncomingVersion

contents = st.lists(st.binary(max_size=40), min_size=1, max_size=5)


def header(data: list[bytes]) -> PublishHeader:
    tensors = [
        TensorInfo(name=f"t{index}", dtype="U8", shape=[len(tensor)], num_bytes=len(tensor))
        for index, tensor in enumerate(data)
    ]
    return PublishHeader(weight_version=7, attempt=2, tensors=tensors)


def chunks(data: list[bytes], chunk_bytes: int) -> list[tuple[Stretch, memoryview]]:
    return [
        (stretch, memoryview(data[stretch.tensor_index])[stretch.offset :][: stretch.num_bytes])
        for stretch in cut([len(tensor) for tensor in data], chunk_bytes)
    ]


def footer(data: list[bytes]) -> PublishFooter:
    return PublishFooter(digests=[bytes_digest(tensor) for tensor in data])


@given(contents, st.integers(1, 20), st.integers(1, 5))
@settings(deadline=None, max_examples=50)
def test_any_cut_into_chunks_and_batches_gives_the_same_file_and_digest(tmp_path_factory, data, chunk_bytes, at_once):
    incoming = IncomingVersion(header(data), tmp_path_factory.mktemp("incoming"))
    try:
        incoming.open()
        waiting = chunks(data, chunk_bytes)
        for first in range(0, len(waiting), at_once):
            incoming.write(waiting[first : first + at_once])
        manifest = incoming.finish(footer(data))
        read = dict(deserialize(incoming.path.read_bytes()))
    finally:
        incoming.close()
    assert [bytes(read[tensor.name]["data"]) for tensor in manifest.tensors] == data
    assert [tensor.digest for tensor in manifest.tensors] == [bytes_digest(tensor) for tensor in data]
    assert manifest.digest == version_digest(manifest.tensors)
    assert manifest.num_bytes == sum(len(tensor) for tensor in data)


@given(contents.filter(lambda data: sum(map(len, data)) > 3), st.integers(1, 20), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=50)
def test_chunks_that_are_lost_doubled_or_swapped_are_refused(tmp_path_factory, data, chunk_bytes, random):
    right = chunks(data, chunk_bytes)
    wrong = list(right)
    damage = random.choice(["lose", "double", "swap"] if len(right) > 1 else ["lose", "double"])
    if damage == "lose":
        wrong.pop(random.randrange(len(wrong)))
    elif damage == "double":
        wrong.insert(random.randrange(len(wrong) + 1), random.choice(wrong))
    else:
        first, second = random.sample(range(len(wrong)), 2)
        wrong[first], wrong[second] = wrong[second], wrong[first]
    incoming = IncomingVersion(header(data), tmp_path_factory.mktemp("incoming"))
    try:
        incoming.open()
        with pytest.raises(ValueError, match=r"expected those of tensor|it is not announced"):
            incoming.write(wrong)
            incoming.finish(footer(data))
    finally:
        incoming.close()


def test_data_that_changed_on_the_way_is_damage(tmp_path):
    incoming = IncomingVersion(header([b"abcd"]), tmp_path)
    incoming.open()
    incoming.write([(Stretch(0, 0, 4), memoryview(b"abxd"))])
    with pytest.raises(WeightTransferError, match="t0 of version 7 was sent with digest"):
        incoming.finish(footer([b"abcd"]))
    incoming.close()


def test_a_footer_with_too_few_digests_is_refused(tmp_path):
    incoming = IncomingVersion(header([b"abcd"]), tmp_path)
    incoming.open()
    incoming.write([(Stretch(0, 0, 4), memoryview(b"abcd"))])
    with pytest.raises(ValueError, match="0 digests came for 1 tensors"):
        incoming.finish(PublishFooter())
    incoming.close()


def test_closing_removes_what_is_partial(tmp_path):
    incoming = IncomingVersion(header([b"abcd"]), tmp_path)
    incoming.open()
    assert list(tmp_path.iterdir()) != []
    incoming.close()
    assert list(tmp_path.iterdir()) == []


def test_closing_before_opening_is_harmless(tmp_path):
    IncomingVersion(header([b"abcd"]), tmp_path).close()


def test_a_version_larger_than_the_disk_is_refused_before_its_data_comes(tmp_path):
    num_bytes = 2**60
    tensor = TensorInfo(name="t", dtype="U8", shape=[num_bytes], num_bytes=num_bytes)
    incoming = IncomingVersion(PublishHeader(weight_version=7, tensors=[tensor]), tmp_path)
    with pytest.raises(RefusedError, match="make room"):
        incoming.open()
    incoming.close()


def test_a_negative_version_is_refused(tmp_path):
    with pytest.raises(ValueError, match="weight version -1"):
        IncomingVersion(PublishHeader(weight_version=-1), tmp_path)


def test_an_empty_chunk_is_refused():
    with pytest.raises(ValueError, match="0 bytes came"):
        ChunkOrder([4]).accept(Stretch(0, 0, 0))


def test_a_chunk_over_the_end_of_its_tensor_is_refused():
    with pytest.raises(ValueError, match="5 bytes came for tensor 0 at 0"):
        ChunkOrder([4, 4]).accept(Stretch(0, 0, 5))
