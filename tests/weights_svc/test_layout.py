"""The safetensors library reads what the layout says."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import deserialize

from streamrl.v1.weights_pb2 import TensorInfo
from weights_svc.layout import ITEM_BYTES, lay_out


def tensor(name: str, dtype: str, shape: list[int]) -> TensorInfo:
    return TensorInfo(name=name, dtype=dtype, shape=shape, num_bytes=math.prod(shape) * ITEM_BYTES[dtype])


tensors = st.lists(
    st.tuples(st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(0, 4), max_size=3)), min_size=1, max_size=8
).map(lambda drawn: [tensor(f"layer.{index}", dtype, shape) for index, (dtype, shape) in enumerate(drawn)])


@given(tensors)
def test_the_library_finds_each_tensor_where_we_put_it(infos):
    layout = lay_out(infos)
    content = bytearray(layout.num_bytes)
    content[: len(layout.header)] = layout.header
    for index, (info, position) in enumerate(zip(infos, layout.positions, strict=True)):
        content[position : position + info.num_bytes] = bytes([index + 1]) * info.num_bytes
    read = dict(deserialize(bytes(content)))
    assert read.keys() == {info.name for info in infos}
    for index, info in enumerate(infos):
        entry = read[info.name]
        assert (entry["dtype"], entry["shape"]) == (info.dtype, list(info.shape))
        assert bytes(entry["data"]) == bytes([index + 1]) * info.num_bytes


@given(tensors)
def test_every_tensor_is_aligned_for_its_dtype(infos):
    for info, position in zip(infos, lay_out(infos).positions, strict=True):
        assert position % ITEM_BYTES[info.dtype] == 0


@pytest.mark.parametrize(
    ("infos", "message"),
    [
        ([], "without tensors"),
        ([tensor("a", "F32", [1]), tensor("a", "F32", [1])], "comes twice"),
        ([tensor("__metadata__", "F32", [1])], "reserved"),
        ([TensorInfo(name="a", dtype="F33", shape=[1], num_bytes=4)], "dtype 'F33'"),
        ([TensorInfo(name="a", dtype="F32", shape=[2, 3], num_bytes=20)], "F32 of shape \\[2, 3\\] has 24"),
        ([TensorInfo(name="a", dtype="F32", shape=[-1, -1], num_bytes=4)], "no negative size"),
    ],
)
def test_tensors_that_make_no_sense_are_refused(infos, message):
    with pytest.raises(ValueError, match=message):
        lay_out(infos)
