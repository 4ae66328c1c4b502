"""The exact difference between two versions of a stretch of a tensor, as few bytes: bit for bit reversible, any dtype.

Items are taken as unsigned integers of their size, and subtracted modulo 2^bits: neighbouring floats of one sign are
neighbouring integers, so a small step of training is a small number, whatever the dtype. The sign goes into the lowest
bit (zigzag). Then, whichever suits:

    sparse  where few items changed: the gaps between their places, and their differences
    dense   where many did: the differences of all items
    raw     the new bytes themselves, when neither is smaller

Both are packed by Blosc, which first sorts the bits or bytes of the items by their place in the item: the highest are
nearly all zero, and the lowest, where they are noise, stay as they are.

    sparse: uint32 changes, uint32 bytes of the next frame, frame of uint32 gaps, frame of differences
    dense:  frame of differences

Pure functions of their arguments; what is decoded has to be compared with a digest by whoever knows it.
"""

import struct
from collections.abc import Iterator
from typing import TypeAlias

import numcodecs.blosc
import numpy as np
import numpy.typing as npt
from numcodecs.blosc import Blosc

from streamrl.errors import WeightTransferError
from streamrl.v1.weights_pb2 import (
    CHUNK_ENCODING_DENSE_DELTA,
    CHUNK_ENCODING_SPARSE_DELTA,
    CHUNK_ENCODING_UNSPECIFIED,
    ChunkEncoding,
)

Buffer: TypeAlias = bytes | memoryview
_Items: TypeAlias = "npt.NDArray[np.unsignedinteger]"

# In the thread that calls, and without Python's lock: who calls has threads of its own.
numcodecs.blosc.use_threads = False

_PACKED_BLOCK_BYTES = 256 * 1024
"""In smaller ones bit planes are so short that packing them is slower, in larger ones nothing is gained."""
_DENSE = Blosc("lz4", clevel=1, shuffle=Blosc.BITSHUFFLE, blocksize=_PACKED_BLOCK_BYTES)
"""An entropy coder would take a tenth off float32 and up to half off bfloat16, at a third to a half of the speed."""
_SPARSE = Blosc("lz4", clevel=1, shuffle=Blosc.SHUFFLE, blocksize=_PACKED_BLOCK_BYTES)
_FEW = Blosc("zstd", clevel=1, shuffle=Blosc.SHUFFLE, blocksize=_PACKED_BLOCK_BYTES)
_SPARSE_SHARE = 1 / 8
"""Up to this share of changed items gaps take fewer bytes than the zeros between, and hardly more time."""
_FEW_SHARE = 1 / 16
"""Up to this share there is time for an entropy coder, which takes two fifths off."""
_VERY_FEW_SHARE = 1 / 20
"""Up to this share of changed items it pays to look for them eight at a time."""
_GAINING_SHARE = 0.95
"""Above this a difference is not worth the time that it takes to apply."""
_BLOCK_BYTES = 128 * 1024
"""So much at a time stays in a core's own cache from one operation to the next, and what an operation gives is no
memory that the system first has to make."""
_SMALL_BYTES = 1024
"""Below this a difference takes longer than it saves."""
_NUM_SAMPLED = 1024
"""So many items, at even distances, tell the share of those that changed."""
_COUNT = np.dtype("<u4")
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}

_HEADER = struct.Struct("<4B3I")
"""What a frame of Blosc opens with: versions of it and of its packer, flags, bytes of an item, of the whole, of a block
and of the frame."""


def encode_delta(base: Buffer, target: Buffer, item_bytes: int) -> "tuple[ChunkEncoding.ValueType, Buffer]":
    """The difference from `base` to `target`, never longer than `target`.

    Args:
        base, target: of one length.
        item_bytes: size of the dtype's items: 1, 2, 4 or 8. Any other than the true one costs bytes, not exactness.
    """
    if len(target) < _SMALL_BYTES:
        return CHUNK_ENCODING_UNSPECIFIED, target
    old, new = _items(base, item_bytes), _items(target, item_bytes)
    share = _changed_share(old, new)
    if share > _SPARSE_SHARE:
        encoding, data = CHUNK_ENCODING_DENSE_DELTA, _pack(_DENSE, _differences(old, new))
    else:
        packer = _FEW if share <= _FEW_SHARE else _SPARSE
        encoding, data = CHUNK_ENCODING_SPARSE_DELTA, _encode_sparse(old, new, packer)
    return (encoding, data) if len(data) <= _GAINING_SHARE * len(target) else (CHUNK_ENCODING_UNSPECIFIED, target)


def decode_delta(
    encoding: "ChunkEncoding.ValueType", data: Buffer, base: Buffer, num_bytes: int, item_bytes: int
) -> Buffer:
    """What `encode_delta` was given as `target`.

    Args:
        num_bytes: its length.

    Raises:
        WeightTransferError: the data was damaged so that it cannot be decoded. Damage that can be decoded is told
            by the tensor's digest alone.
    """
    if encoding == CHUNK_ENCODING_UNSPECIFIED:
        if len(data) != num_bytes:
            raise WeightTransferError(f"a chunk of {num_bytes} bytes came with {len(data)}")
        return data
    if len(base) != num_bytes:
        raise WeightTransferError(f"a difference of {num_bytes} bytes came for {len(base)} bytes")
    old = _items(base, item_bytes)
    try:
        if encoding == CHUNK_ENCODING_SPARSE_DELTA:
            new = _decode_sparse(data, old)
        elif encoding == CHUNK_ENCODING_DENSE_DELTA:
            new = _unpack(data, len(old), old.dtype)
            _add(old, new)
        else:
            raise WeightTransferError(f"a chunk came in form {encoding}, which is not known here")
    except (RuntimeError, ValueError, IndexError) as error:
        raise WeightTransferError(f"a difference came damaged: {error}") from error
    return new.view(np.uint8).data


def _encode_sparse(old: _Items, new: _Items, packer: Blosc) -> bytes:
    places = _places_of_changes(old, new)
    ends = places.astype(_COUNT)
    gaps = ends.copy()
    gaps[1:] -= ends[:-1]
    packed_gaps = _pack(packer, gaps)
    packed_differences = _pack(packer, _differences(old.take(places), new.take(places)))
    return b"".join((np.array([len(places), len(packed_gaps)], _COUNT).tobytes(), packed_gaps, packed_differences))


def _decode_sparse(data: Buffer, old: _Items) -> _Items:
    counts = np.frombuffer(data, _COUNT, 2)
    num_places, gaps_bytes = counts.tolist()
    if num_places > len(old):
        raise ValueError(f"{num_places} changes in {len(old)} items")
    packed = memoryview(data)[counts.nbytes :]
    places = np.cumsum(_unpack(packed[:gaps_bytes], num_places, _COUNT), dtype=np.intp)
    changed = _unpack(packed[gaps_bytes:], num_places, old.dtype)
    _add(old[places], changed)
    new = old.copy()
    new[places] = changed
    return new


def _changed_share(old: _Items, new: _Items) -> float:
    """About the share of items that differ."""
    # Odd, so that the sample does not stay in one column of a matrix.
    step = len(old) // _NUM_SAMPLED | 1
    changed = old[::step] != new[::step]
    return np.count_nonzero(changed) / len(changed)


def _pack(packer: Blosc, items: _Items) -> bytes:
    """A frame; nothing, where there are no items."""
    frame: bytes = packer.encode(items) if len(items) else b""
    return frame


def _unpack(frame: Buffer, num_items: int, dtype: "np.dtype[np.unsignedinteger]") -> _Items:
    """What `_pack` was given.

    Raises:
        ValueError: the frame says of itself that it is of something else, or is no frame. Blosc, which believes what a
            frame says of its own length, was not asked.
        RuntimeError: it was damaged.
    """
    if num_items == 0 and not frame:
        return np.empty(0, dtype)
    if len(frame) < _HEADER.size:
        raise ValueError(f"{len(frame)} bytes where a frame was expected")
    *_format, item_bytes, whole_bytes, _block_bytes, frame_bytes = _HEADER.unpack_from(frame)
    said, expected = (item_bytes, whole_bytes, frame_bytes), (dtype.itemsize, num_items * dtype.itemsize, len(frame))
    if said != expected:
        raise ValueError(f"bytes of an item, of the whole and of the frame are {said} where {expected} were expected")
    items = np.empty(num_items, dtype)
    Blosc().decode(frame, items)
    return items


def _items(data: Buffer, item_bytes: int) -> _Items:
    """The data as integers; as single bytes, when a stretch ends inside an item."""
    return np.frombuffer(data, f"<u{item_bytes if len(data) % item_bytes == 0 else 1}")


def _differences(old: _Items, new: _Items) -> _Items:
    """new - old, small in either direction."""
    signed, sign_place = _SIGNED[new.itemsize], 8 * new.itemsize - 1
    differences = np.empty_like(new)
    room = np.empty(_BLOCK_BYTES // new.itemsize, signed)
    for block in _blocks(new):
        difference = differences[block]
        np.subtract(new[block], old[block], out=difference)
        sign = np.right_shift(difference.view(signed), sign_place, out=room[: len(difference)])
        difference += difference
        difference ^= sign.view(new.dtype)
    return differences


def _add(old: _Items, differences: _Items) -> None:
    """Turns what `_differences` gave into the new items."""
    for block in _blocks(old):
        difference = differences[block]
        sign = difference & 1
        np.negative(sign, out=sign)
        difference >>= 1
        difference ^= sign
        difference += old[block]


def _blocks(items: _Items) -> Iterator[slice]:
    block_items = _BLOCK_BYTES // items.itemsize
    return (slice(first, first + block_items) for first in range(0, len(items), block_items))


def _places_of_changes(old: _Items, new: _Items) -> "npt.NDArray[np.intp]":
    """`np.flatnonzero(old != new)`, in two thirds of the time or less where few differ."""
    num_items = len(old)
    # numpy has a loop without branches, which takes the same time whatever is set, but leaves it where less than a
    # tenth is: there a branch often goes wrong. So a tenth more is set behind the items.
    marks = np.empty(num_items + num_items // 9 + 8, np.bool_)
    marks[num_items:] = True
    changed = np.not_equal(old, new, out=marks[:num_items])
    num_changed = np.count_nonzero(changed)
    if num_changed > _VERY_FEW_SHARE * num_items:
        return np.flatnonzero(marks)[:num_changed]
    eights = marks[: (num_items + 7) // 8 * 8].view(np.uint64)
    used = np.flatnonzero(eights != 0)
    inside = np.flatnonzero(eights[used].view(np.bool_))
    places: npt.NDArray[np.intp] = (used[inside >> 3] << 3) + (inside & 7)
    return places[:num_changed]
