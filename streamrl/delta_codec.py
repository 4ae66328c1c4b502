"""The exact difference between two versions of a stretch of a tensor, as few bytes: bit for bit reversible, any dtype.

Items are taken as unsigned integers of their size, and subtracted modulo 2^bits: neighbouring floats of one sign are
neighbouring integers, so a small step of training is a small number, whatever the dtype. The sign goes into the lowest
bit (zigzag). Then, whichever suits:

    sparse  where few items changed: the gaps between their places, and their differences
    dense   where many did: the differences of all items
    raw     the new bytes themselves, when neither is smaller

Differences are stored byte plane by byte plane, lowest bytes first (byte_planes.py); the lowest ones, where they are
noise, stand together as they are.

Pure functions of their arguments; what is decoded has to be compared with a digest by whoever knows it.
"""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import zstandard

from streamrl.byte_planes import Form, PlanePacker, forms_of, places_of
from streamrl.errors import WeightTransferError
from streamrl.v1.weights_pb2 import (
    CHUNK_ENCODING_DENSE_DELTA,
    CHUNK_ENCODING_SPARSE_DELTA,
    CHUNK_ENCODING_UNSPECIFIED,
    ChunkEncoding,
)

Buffer: TypeAlias = bytes | memoryview
_Items: TypeAlias = "npt.NDArray[np.unsignedinteger]"
_Bytes: TypeAlias = "npt.NDArray[np.uint8]"

_SPARSE_SHARE = 1 / 2
"""Up to this share of changed items gaps take fewer bytes, and much less time, than the zeros between."""
_SMALL_BYTES = 1024
"""Below this a difference takes longer than it saves."""
_FAR = 255
"""A gap of so many items or more stands apart, as 4 bytes."""
_COUNT = np.dtype("<u4")
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


class DeltaCodec:
    """Keeps the buffers of its library between calls: for one thread at a time."""

    def __init__(self) -> None:
        self._planes = PlanePacker()

    def encode(self, base: Buffer, target: Buffer, item_bytes: int) -> "tuple[ChunkEncoding.ValueType, Buffer]":
        """The difference from `base` to `target`, never longer than `target`.

        Args:
            base, target: of one length.
            item_bytes: size of the dtype's items: 1, 2, 4 or 8. Any other than the true one costs bytes, not exactness.
        """
        if len(target) < _SMALL_BYTES:
            return CHUNK_ENCODING_UNSPECIFIED, target
        old, new = _items(base, item_bytes), _items(target, item_bytes)
        sample = _sample(old, new)
        if np.count_nonzero(sample) > _SPARSE_SHARE * len(sample):
            encoding, data = CHUNK_ENCODING_DENSE_DELTA, self._encode_dense(old, new, forms_of(_bytes_of(sample)))
        else:
            encoding, data = CHUNK_ENCODING_SPARSE_DELTA, self._encode_sparse(places_of(old != new), old, new)
        return (encoding, data) if len(data) < len(target) else (CHUNK_ENCODING_UNSPECIFIED, target)

    def decode(
        self, encoding: "ChunkEncoding.ValueType", data: Buffer, base: Buffer, num_bytes: int, item_bytes: int
    ) -> Buffer:
        """What `encode` was given as `target`.

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
                new = self._decode_sparse(data, old)
            elif encoding == CHUNK_ENCODING_DENSE_DELTA:
                new = self._decode_dense(data, old)
            else:
                raise WeightTransferError(f"a chunk came in form {encoding}, which is not known here")
        except (zstandard.ZstdError, ValueError, IndexError) as error:
            raise WeightTransferError(f"a difference came damaged: {error}") from error
        return new.view(np.uint8).data

    def _encode_sparse(self, places: "npt.NDArray[np.intp]", old: _Items, new: _Items) -> bytes:
        gaps = np.diff(places, prepend=0)
        near, far_places = gaps.astype(np.uint8), places_of(gaps >= _FAR)
        near[far_places] = _FAR
        far = gaps[far_places].astype(_COUNT)
        counts = np.array([len(places), len(far)], _COUNT)
        difference = _zigzag(old[places], new[places])
        planes = (_plane(difference, place) for place in range(old.itemsize))
        parts = (near, far.view(np.uint8), *planes)
        return b"".join((counts.tobytes(), self._planes.pack(np.concatenate(parts), Form.PACKED)))

    def _decode_sparse(self, data: Buffer, old: _Items) -> _Items:
        counts = np.frombuffer(data, _COUNT, 2)
        num_places, num_far = int(counts[0]), int(counts[1])
        if not num_far <= num_places <= len(old):
            raise ValueError(f"{num_places} changes in {len(old)} items")
        num_bytes = num_places * (1 + old.itemsize) + num_far * _COUNT.itemsize
        parts = self._planes.unpack(memoryview(data)[counts.nbytes :], Form.PACKED, num_bytes)
        near, far, planes = np.split(parts, [num_places, num_places + num_far * _COUNT.itemsize])
        gaps = near.astype(np.intp)
        gaps[near == _FAR] = far.view(_COUNT)
        places = np.cumsum(gaps)
        new = old.copy()
        new[places] = _undo_zigzag(old[places], _from_planes(planes.reshape(old.itemsize, num_places), old.dtype))
        return new

    def _encode_dense(self, old: _Items, new: _Items, forms: Sequence[Form]) -> bytes:
        """
        Args:
            forms: what suits each plane, lowest first, as far as a sample tells.
        """
        low = _num_low_bytes(forms)
        low_part = np.empty(len(old), f"<u{low}") if low else None
        planes = {place: np.zeros(len(old), np.uint8) for place in range(low, old.itemsize)}
        used_bits = 0
        for block in _blocks(old):
            difference = _zigzag(old[block], new[block])
            bits = int(np.bitwise_or.reduce(difference))
            used_bits |= bits
            if low_part is not None:
                np.copyto(low_part[block], difference, casting="unsafe")
            for place, plane in planes.items():
                if _uses(bits, place):
                    plane[block] = _plane(difference, place)
        packed: list[Buffer] = [b"" if low_part is None else low_part.view(np.uint8).data]
        said = [low]
        for place, plane in planes.items():
            form = forms[place] if _uses(used_bits, place) else Form.ABSENT
            packed.append(self._planes.pack(plane, form))
            said += [form, len(packed[-1])]
        return b"".join((np.array(said, _COUNT).tobytes(), *packed))

    def _decode_dense(self, data: Buffer, old: _Items) -> _Items:
        low = int(np.frombuffer(data, _COUNT, 1)[0])
        if low not in _LOW_BYTES or low > old.itemsize:
            raise ValueError(f"{low} lowest bytes of {old.itemsize}")
        said = np.frombuffer(data, _COUNT, 2 * (old.itemsize - low), _COUNT.itemsize).reshape(-1, 2)
        at = _COUNT.itemsize + said.nbytes + low * len(old)
        low_part = np.frombuffer(data, f"<u{low}", len(old), _COUNT.itemsize + said.nbytes) if low else None
        planes: dict[int, _Bytes] = {}
        for place, (form, length) in enumerate(said.tolist(), low):
            if form != Form.ABSENT:
                planes[place] = self._planes.unpack(memoryview(data)[at : at + length], Form(form), len(old))
                at += length
        new = np.empty_like(old)
        for block in _blocks(old):
            difference = np.zeros_like(old[block]) if low_part is None else low_part[block].astype(old.dtype)
            for place, plane in planes.items():
                _bytes_of(difference)[:, place] = plane[block]
            new[block] = _undo_zigzag(old[block], difference)
        return new


def _items(data: Buffer, item_bytes: int) -> _Items:
    """The data as integers; as single bytes, when a stretch ends inside an item."""
    return np.frombuffer(data, f"<u{item_bytes if len(data) % item_bytes == 0 else 1}")


def _sample(old: _Items, new: _Items) -> _Items:
    """Differences of items that lie at even distances: of fewer where there are few, for it is time that they share."""
    step = max(1, min(len(old) // _FEWEST_SAMPLED, max(_SAMPLE_STEP, len(old) // _MOST_SAMPLED)))
    return _zigzag(old[::step], new[::step])


def _zigzag(old: _Items, new: _Items) -> _Items:
    """new - old, small in either direction."""
    difference = new - old
    sign = difference.view(_SIGNED[old.itemsize]) >> (8 * old.itemsize - 1)
    difference <<= 1
    difference ^= sign.view(old.dtype)
    return difference


def _undo_zigzag(old: _Items, difference: _Items) -> _Items:
    """old + the difference that `_zigzag` gave, which is lost."""
    sign = difference & 1
    np.negative(sign, out=sign)
    difference >>= 1
    difference ^= sign
    difference += old
    return difference


def _bytes_of(items: _Items) -> _Bytes:
    """[items, item size], the lowest byte of each first: a view."""
    return items.view(np.uint8).reshape(-1, items.itemsize)


def _plane(items: _Items, place: int) -> _Bytes:
    """The bytes of all items at a place: a shift and a cast are several times as fast as a copy from byte to byte."""
    return (items >> (8 * place) if place else items).astype(np.uint8)


def _from_planes(planes: _Bytes, dtype: "np.dtype[np.unsignedinteger]") -> _Items:
    """
    Args:
        planes: [item size, items].
    """
    return planes.T.copy(order="C").view(dtype).reshape(-1)


def _uses(bits: int, place: int) -> bool:
    """Whether any of these bits is in the byte at a place."""
    return bits >> (8 * place) & 0xFF != 0


_BLOCK_BYTES = 64 * 1024
"""So much at a time stays in a core's own cache from one operation to the next, and what an operation gives is no
memory that the system first has to make."""


def _blocks(items: _Items) -> Iterator[slice]:
    block_items = _BLOCK_BYTES // items.itemsize
    return (slice(first, first + block_items) for first in range(0, len(items), block_items))


_FEWEST_SAMPLED, _MOST_SAMPLED = 256, 1024
_SAMPLE_STEP = 64
_LOW_BYTES = (0, 1, 2, 4)


def _num_low_bytes(forms: Sequence[Form]) -> int:
    """How many of the lowest bytes of an item stand together, as they are: those that are noise, if they make an
    integer that is smaller than the item."""
    num_noisy = next((place for place, form in enumerate(forms) if form != Form.NOISE), len(forms))
    return max(low for low in _LOW_BYTES if low <= num_noisy and low < len(forms))
