"""Memory that the fetching process fills and the engine's workers map."""

import subprocess
import sys
from collections.abc import Mapping

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from generator_svc.version_buffer import VersionBuffer, open_tensors, tensor_offsets
from streamrl.v1.weights_pb2 import TensorInfo, VersionManifest

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8"}


def manifest_of(tensors: Mapping[str, torch.Tensor]) -> VersionManifest:
    return VersionManifest(
        weight_version=3,
        tensors=[
            TensorInfo(name=name, dtype=DTYPES[t.dtype], shape=t.shape, num_bytes=t.numel() * t.element_size())
            for name, t in tensors.items()
        ],
    )


def filled(tensors: Mapping[str, torch.Tensor]) -> VersionBuffer:
    buffer = VersionBuffer(manifest_of(tensors))
    for index, tensor in enumerate(tensors.values()):
        buffer.write(index, 0, tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return buffer


@hypothesis.given(st.lists(st.integers(0, 1000), max_size=8))
def test_tensors_neither_overlap_nor_lose_their_alignment(sizes: list[int]) -> None:
    manifest = VersionManifest(tensors=[TensorInfo(num_bytes=size) for size in sizes])
    offsets, num_bytes = tensor_offsets(manifest)
    ends = [first + size for first, size in zip(offsets, sizes, strict=True)]
    assert all(first % 64 == 0 for first in offsets)
    assert all(end <= first for end, first in zip(ends, offsets[1:], strict=False))
    assert max(ends, default=0) <= num_bytes


def test_tensors_of_any_dtype_and_shape_come_out_as_they_went_in() -> None:
    tensors = {
        "matrix": torch.randn(3, 5),
        "half": torch.randn(7).to(torch.bfloat16),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "bytes": torch.arange(9, dtype=torch.uint8),
    }
    buffer = filled(tensors)
    opened = dict(open_tensors(buffer.path, buffer.manifest))
    buffer.close()
    assert list(opened) == list(tensors)
    assert all(torch.equal(opened[name], tensor) for name, tensor in tensors.items())


def test_writing_into_a_tensor_changes_nobody_elses() -> None:
    buffer = filled({"weight": torch.zeros(4)})
    dict(open_tensors(buffer.path, buffer.manifest))["weight"].fill_(1.0)
    assert torch.equal(dict(open_tensors(buffer.path, buffer.manifest))["weight"], torch.zeros(4))


def test_another_process_reads_the_memory_while_this_one_holds_it() -> None:
    buffer = filled({"weight": torch.arange(4, dtype=torch.uint8)})
    read = [sys.executable, "-c", "import sys; sys.stdout.write(open(sys.argv[1], 'rb').read(4).hex())", buffer.path]
    assert subprocess.run(read, capture_output=True, text=True, check=True).stdout == "00010203"
    buffer.close()


def test_closing_twice_is_harmless() -> None:
    buffer = filled({"weight": torch.zeros(4)})
    buffer.close()
    buffer.close()


@pytest.mark.parametrize(
    ("info", "complaint"),
    [
        (TensorInfo(name="w", dtype="F4", shape=[2], num_bytes=8), "dtype 'F4'"),
        (TensorInfo(name="w", dtype="F32", shape=[3], num_bytes=8), "8 bytes"),
    ],
)
def test_a_tensor_that_does_not_fit_its_description_is_refused(info: TensorInfo, complaint: str) -> None:
    buffer = VersionBuffer(VersionManifest(tensors=[info]))
    with pytest.raises(ValueError, match=complaint):
        list(open_tensors(buffer.path, buffer.manifest))
    buffer.close()
