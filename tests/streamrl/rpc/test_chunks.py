"""Chunks are cut without gaps, and our encoding is the one of the generated classes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.rpc.chunks import Stretch, cut, decode_publish_request, encode_fetch_response, encode_publish_request
from streamrl.v1.weights_pb2 import FetchResponse, PublishFooter, PublishRequest, TensorChunk

sizes = st.lists(st.integers(0, 50), max_size=8)
tensor_indices = st.integers(0, 2**31 - 1)
offsets = st.integers(0, 2**62)


@given(sizes, st.integers(1, 20), st.data())
def test_the_stretches_cover_every_byte_once_and_in_order_from_any_position(tensor_bytes, chunk_bytes, data):
    index = data.draw(st.integers(0, len(tensor_bytes)))
    offset = data.draw(st.integers(0, tensor_bytes[index])) if index < len(tensor_bytes) else 0
    covered = []
    for stretch in cut(tensor_bytes, chunk_bytes, index, offset):
        assert 0 < stretch.num_bytes <= chunk_bytes
        covered += [(stretch.tensor_index, stretch.offset + byte) for byte in range(stretch.num_bytes)]
    everything = [(tensor, byte) for tensor, num_bytes in enumerate(tensor_bytes) for byte in range(num_bytes)]
    assert covered == [position for position in everything if position >= (index, offset)]


@given(tensor_indices, offsets, st.binary(max_size=300))
def test_the_generated_classes_read_what_we_encode(tensor_index, offset, data):
    stretch = Stretch(tensor_index, offset, len(data))
    expected = TensorChunk(tensor_index=tensor_index, offset=offset, data=data)
    assert PublishRequest.FromString(encode_publish_request(stretch, memoryview(data))).chunk == expected
    assert FetchResponse.FromString(encode_fetch_response(stretch, data)).chunk == expected


@given(st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1), st.binary(max_size=300))
def test_we_read_what_the_generated_classes_write(tensor_index, offset, data):
    chunk = TensorChunk(tensor_index=tensor_index, offset=offset, data=data)
    decoded = decode_publish_request(PublishRequest(chunk=chunk).SerializeToString())
    assert isinstance(decoded, tuple)
    stretch, view = decoded
    assert stretch == Stretch(tensor_index, offset, len(data)) and bytes(view) == data


def test_a_chunk_with_its_fields_in_another_order_is_read_too():
    # data (field 3) before offset (field 2), in a chunk (field 2) of 5 bytes
    message = bytes([0x12, 5, 0x1A, 1, 0x41, 0x10, 7])
    decoded = decode_publish_request(message)
    assert isinstance(decoded, tuple)
    assert decoded[0] == Stretch(0, 7, 1) and bytes(decoded[1]) == b"A"


def test_another_part_is_given_as_the_request_itself():
    request = PublishRequest(footer=PublishFooter(digests=["ab"]))
    assert decode_publish_request(request.SerializeToString()) == request


@given(st.binary(max_size=40))
def test_bytes_that_are_no_message_are_a_value_error_or_what_the_generated_class_reads(message):
    try:
        decoded = decode_publish_request(message)
    except ValueError:
        return
    expected = PublishRequest.FromString(message)
    if isinstance(decoded, tuple):
        stretch, data = decoded
        assert expected.chunk == TensorChunk(tensor_index=stretch.tensor_index, offset=stretch.offset, data=bytes(data))
    else:
        assert decoded == expected


def test_a_message_cut_short_is_a_value_error():
    whole = encode_publish_request(Stretch(1, 0, 100), b"x" * 100)
    with pytest.raises(ValueError, match="no PublishRequest"):
        decode_publish_request(whole[:50])


def test_a_number_without_an_end_is_given_up_at_once():
    # Its value would grow with each byte: minutes at this length, days at that of the longest message.
    with pytest.raises(ValueError, match="no PublishRequest"):
        decode_publish_request(b"\x12" + b"\xff" * 1_000_000 + b"\x01")
