"""Differences come out as they went in, whatever the data, and take few bytes where little changed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.delta_codec import decode_delta, encode_delta
from streamrl.errors import WeightTransferError
from streamrl.v1.weights_pb2 import (
    CHUNK_ENCODING_DENSE_DELTA,
    CHUNK_ENCODING_SPARSE_DELTA,
    CHUNK_ENCODING_UNSPECIFIED,
)

ITEM_SIZES = (1, 2, 4, 8)


@st.composite
def versions(draw):
    """A base, what became of it, and the size of its items."""
    item_bytes = draw(st.sampled_from(ITEM_SIZES))
    num_items = draw(st.integers(0, 3000))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    base = random.integers(0, 256, num_items * item_bytes, np.uint8).view(f"<u{item_bytes}")
    changed = random.random(num_items) < draw(st.sampled_from([0.0, 0.001, 0.06, 0.12, 0.3, 1.0]))
    step = draw(st.sampled_from([1, 3, 255, 2**62]))
    target = base + (changed * random.integers(-step, step + 1, num_items)).astype(base.dtype)
    return base.tobytes(), target.tobytes(), item_bytes


@given(versions())
@settings(deadline=None, max_examples=50)
def test_what_is_decoded_is_what_was_encoded(case):
    base, target, item_bytes = case
    encoding, data = encode_delta(base, target, item_bytes)
    assert len(data) <= len(target)
    assert bytes(decode_delta(encoding, data, base, len(target), item_bytes)) == target


@given(st.binary(max_size=200), st.binary(max_size=200), st.sampled_from(ITEM_SIZES))
def test_any_bytes_at_all_come_back(base, target, item_bytes):
    base, target = base[: len(target)], target[: len(base)]
    assert bytes(decode_delta(*encode_delta(base, target, item_bytes), base, len(target), item_bytes)) == target


@given(versions(), st.data())
@settings(deadline=None, max_examples=50)
def test_damaged_differences_give_other_data_or_an_error_and_nothing_else(case, data):
    base, target, item_bytes = case
    encoding, difference = encode_delta(base, target, item_bytes)
    damaged = bytearray(difference)
    if damaged:
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    damaged = damaged[: data.draw(st.integers(0, len(damaged)))]
    try:
        decoded = decode_delta(encoding, bytes(damaged), base, len(target), item_bytes)
    except WeightTransferError:
        return
    assert len(decoded) == len(target)


def bfloat16(values: "np.ndarray[tuple[int], np.dtype[np.float32]]") -> bytes:
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).tobytes()


def test_a_small_step_of_bfloat16_weights_takes_a_hundredth():
    random = np.random.default_rng(0)
    weights = random.normal(0, 0.05, 1_000_000).astype(np.float32)
    base, target = bfloat16(weights), bfloat16(weights + 1e-6 * random.choice([-1, 1], len(weights)).astype(np.float32))
    encoding, data = encode_delta(base, target, 2)
    assert encoding == CHUNK_ENCODING_SPARSE_DELTA
    assert len(data) < 0.02 * len(target)


def test_a_step_of_float32_weights_is_a_dense_difference():
    random = np.random.default_rng(0)
    weights = random.normal(0, 0.05, 1_000_000).astype(np.float32)
    target = (weights + 1e-4 * random.normal(0, 1, len(weights)).astype(np.float32)).tobytes()
    encoding, data = encode_delta(weights.tobytes(), target, 4)
    assert encoding == CHUNK_ENCODING_DENSE_DELTA
    assert len(data) < 0.75 * len(target)


def test_noise_is_sent_as_it_is():
    random = np.random.default_rng(0)
    encoding, _data = encode_delta(random.bytes(10_000), random.bytes(10_000), 2)
    assert encoding == CHUNK_ENCODING_UNSPECIFIED


def test_a_difference_in_an_unknown_form_or_to_something_of_another_length_is_an_error():
    with pytest.raises(WeightTransferError, match="form 77"):
        decode_delta(77, b"", b"12", 2, 2)
    with pytest.raises(WeightTransferError, match="2 bytes came for 1"):
        decode_delta(CHUNK_ENCODING_SPARSE_DELTA, b"", b"1", 2, 2)


@pytest.mark.parametrize("share", [0.001, 0.04, 0.07, 0.1, 0.2, 0.9])
def test_small_steps_of_any_share_of_items_come_back_and_take_few_bytes(share):
    random = np.random.default_rng(0)
    base = random.integers(0, 2**16, 100_000, np.uint16)
    target = base + ((random.random(len(base)) < share) * random.choice([-1, 1], len(base))).astype(np.uint16)
    encoding, data = encode_delta(base.tobytes(), target.tobytes(), 2)
    assert bytes(decode_delta(encoding, data, base.tobytes(), target.nbytes, 2)) == target.tobytes()
    assert encoding == (CHUNK_ENCODING_SPARSE_DELTA if share < 0.125 else CHUNK_ENCODING_DENSE_DELTA)
    assert len(data) < min(share, 0.2) * target.nbytes + 200


@pytest.mark.parametrize("share", [0.05, 0.12, 1.0])
@pytest.mark.parametrize("place", [3, 4, 12], ids=["size of an item", "bytes of the whole", "bytes of the frame"])
def test_a_frame_that_says_to_hold_something_else_is_refused(share, place):
    random = np.random.default_rng(0)
    base = random.integers(0, 2**16, 10_000, np.uint16)
    target = base + (random.random(len(base)) < share).astype(np.uint16)
    encoding, data = encode_delta(base.tobytes(), target.tobytes(), 2)
    frame_at = 8 if encoding == CHUNK_ENCODING_SPARSE_DELTA else 0
    damaged = bytearray(data)
    damaged[frame_at + place : frame_at + place + (1 if place == 3 else 4)] = b"\xff" if place == 3 else b"\xff" * 4
    with pytest.raises(WeightTransferError, match="were expected"):
        decode_delta(encoding, bytes(damaged), base.tobytes(), target.nbytes, 2)


def test_more_changes_than_there_are_items_are_refused():
    with pytest.raises(WeightTransferError, match="4294967295 changes in 1000 items"):
        decode_delta(CHUNK_ENCODING_SPARSE_DELTA, b"\xff" * 8, bytes(2000), 2000, 2)
