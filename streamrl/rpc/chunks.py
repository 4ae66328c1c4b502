"""Tensor data on the wire: how it is cut into chunks, and how a chunk is encoded with one copy.

Protobuf's own encoder copies the data of a chunk three times with the interpreter's lock held, which halves the rate of
a stream. What `encode_*` returns is byte for byte what the generated classes write and read; only senders use it.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from streamrl.v1.weights_pb2 import FetchResponse, PublishRequest, TensorChunk

_LENGTH_DELIMITED = 2


class Stretch(NamedTuple):
    """A stretch of one tensor's data."""

    tensor_index: int
    offset: int
    """Byte position inside the tensor."""
    num_bytes: int


def cut(
    tensor_bytes: Sequence[int], chunk_bytes: int, first_tensor_index: int = 0, first_offset: int = 0
) -> Iterator[Stretch]:
    """The stretches that cover all tensors in order from a position on. None is empty or reaches over two tensors.

    Args:
        tensor_bytes: length of each tensor's data, in bytes.
        chunk_bytes: longest stretch.
        first_tensor_index, first_offset: where to start.
    """
    offset = first_offset
    for tensor_index in range(first_tensor_index, len(tensor_bytes)):
        while offset < tensor_bytes[tensor_index]:
            num_bytes = min(chunk_bytes, tensor_bytes[tensor_index] - offset)
            yield Stretch(tensor_index, offset, num_bytes)
            offset += num_bytes
        offset = 0


def encode_publish_request(stretch: Stretch, data: bytes | memoryview) -> bytes:
    """A PublishRequest that carries one chunk, serialised."""
    return _encode(PublishRequest.CHUNK_FIELD_NUMBER, stretch, data)


def encode_fetch_response(stretch: Stretch, data: bytes | memoryview) -> bytes:
    """A FetchResponse, serialised."""
    return _encode(FetchResponse.CHUNK_FIELD_NUMBER, stretch, data)


def _encode(field_number: int, stretch: Stretch, data: bytes | memoryview) -> bytes:
    """A message whose one field is a TensorChunk: the fields of a message may come in any order, the data last."""
    position = TensorChunk(tensor_index=stretch.tensor_index, offset=stretch.offset).SerializeToString()
    before_data = position + _tag(TensorChunk.DATA_FIELD_NUMBER) + _varint(len(data))
    return b"".join((_tag(field_number), _varint(len(before_data) + len(data)), before_data, data))


def _tag(field_number: int) -> bytes:
    return _varint(field_number << 3 | _LENGTH_DELIMITED)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
