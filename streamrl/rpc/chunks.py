"""Tensor data on the wire: how it is cut into chunks, and how chunks are encoded with one copy and decoded with none.

Protobuf's own classes copy the data of a chunk several times with the interpreter's lock held, which halves the rate of
a stream. These functions write what the generated classes read, and read what those write; either end may use either.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from google.protobuf.message import DecodeError

from streamrl.v1.weights_pb2 import (
    CHUNK_ENCODING_UNSPECIFIED,
    ChunkEncoding,
    FetchResponse,
    PublishRequest,
    TensorChunk,
)

_LENGTH_DELIMITED = 2
_TENSOR_INDEX_TAG = TensorChunk.TENSOR_INDEX_FIELD_NUMBER << 3
_OFFSET_TAG = TensorChunk.OFFSET_FIELD_NUMBER << 3
_DATA_TAG = TensorChunk.DATA_FIELD_NUMBER << 3 | _LENGTH_DELIMITED


class Stretch(NamedTuple):
    """A stretch of one tensor's data."""

    tensor_index: int
    offset: int
    """Byte position inside the tensor."""
    num_bytes: int


class FetchedChunk(NamedTuple):
    """A chunk as a fetch sends it: plain, or as a difference to the base version."""

    stretch: Stretch
    encoding: "ChunkEncoding.ValueType"
    data: bytes | memoryview


_LARGEST = Stretch(tensor_index=2**31 - 1, offset=2**63 - 1, num_bytes=2**31 - 1)
"""Above these lie negative numbers, which the generated classes read."""


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


def decode_publish_request(message: bytes) -> PublishRequest | tuple[Stretch, memoryview]:
    """The chunk that a serialised PublishRequest carries, its data a view of the message; or the request, when it is
    another part.

    Raises:
        ValueError: the message cannot be read.
    """
    chunk = _decode_chunk(memoryview(message), PublishRequest.CHUNK_FIELD_NUMBER)
    if chunk is not None:
        return chunk
    try:
        request = PublishRequest.FromString(message)
    except DecodeError as error:
        raise ValueError(f"a message of {len(message)} bytes is no PublishRequest: {error}") from error
    if request.HasField("chunk"):  # its fields in another order than anybody writes them
        data = memoryview(request.chunk.data)
        return Stretch(request.chunk.tensor_index, request.chunk.offset, len(data)), data
    return request


def encode_fetched_chunk(chunk: "FetchedChunk") -> bytes:
    """A FetchResponse with a difference or a stretch of plain data, serialised."""
    stretch, encoding, data = chunk
    if encoding == CHUNK_ENCODING_UNSPECIFIED:
        return encode_fetch_response(stretch, data)
    return FetchResponse(
        chunk=TensorChunk(
            tensor_index=stretch.tensor_index,
            offset=stretch.offset,
            data=bytes(data),
            encoding=encoding,
            num_bytes=stretch.num_bytes,
        )
    ).SerializeToString()


def decode_fetch_response(message: bytes) -> "FetchedChunk":
    """The chunk that a serialised FetchResponse carries, its data a view of the message where it stands as it is.

    Raises:
        ValueError: the message cannot be read.
    """
    plain = _decode_chunk(memoryview(message), FetchResponse.CHUNK_FIELD_NUMBER)
    if plain is not None:
        return FetchedChunk(plain[0], CHUNK_ENCODING_UNSPECIFIED, plain[1])
    try:
        return fetched_chunk(FetchResponse.FromString(message).chunk)
    except DecodeError as error:
        raise ValueError(f"a message of {len(message)} bytes is no FetchResponse: {error}") from error


def fetched_chunk(chunk: TensorChunk) -> "FetchedChunk":
    """A chunk as the generated classes read it."""
    stretch = Stretch(chunk.tensor_index, chunk.offset, chunk.num_bytes or len(chunk.data))
    return FetchedChunk(stretch, chunk.encoding, memoryview(chunk.data))


def _encode(field_number: int, stretch: Stretch, data: bytes | memoryview) -> bytes:
    """A message whose one field is a TensorChunk."""
    position = TensorChunk(tensor_index=stretch.tensor_index, offset=stretch.offset).SerializeToString()
    before_data = position + _varint(_DATA_TAG) + _varint(len(data))
    tag = _varint(field_number << 3 | _LENGTH_DELIMITED)
    return b"".join((tag, _varint(len(before_data) + len(data)), before_data, data))


def _decode_chunk(message: memoryview, field_number: int) -> tuple[Stretch, memoryview] | None:
    """The chunk of a message as `_encode` writes it, and the generated classes do: the data comes last. None when the
    message looks otherwise."""
    if len(message) == 0 or message[0] != (field_number << 3 | _LENGTH_DELIMITED):
        return None
    try:
        num_chunk_bytes, at = _read_varint(message, 1)
        if at + num_chunk_bytes != len(message):
            return None
        numbers = {_TENSOR_INDEX_TAG: 0, _OFFSET_TAG: 0}
        while message[at] in numbers:
            numbers[message[at]], at = _read_varint(message, at + 1)
        if message[at] != _DATA_TAG:
            return None
        num_bytes, at = _read_varint(message, at + 1)
    except IndexError:
        return None
    stretch = Stretch(numbers[_TENSOR_INDEX_TAG], numbers[_OFFSET_TAG], num_bytes)
    if at + num_bytes != len(message) or any(number > most for number, most in zip(stretch, _LARGEST, strict=True)):
        return None
    return stretch, message[at:]


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _read_varint(message: memoryview, at: int) -> tuple[int, int]:
    """A number, and where the message goes on. Raises IndexError where there is none."""
    value = 0
    for shift in range(0, 64, 7):
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    # A longer one would take time in the square of its length.
    raise IndexError("a number of more than ten bytes")
