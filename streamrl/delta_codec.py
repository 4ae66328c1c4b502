"""The exact difference between two versions of a stretch of a tensor, as few bytes: bit for bit reversible, any dtype.

Items are taken as unsigned integers of their size, and subtracted modulo 2^bits: neighbouring floats of one sign are
neighbouring integers, so a small step of training is a small number, whatever the dtype. The sign goes into the lowest
bit (zigzag). Then, whichever suits:

    sparse  where few items changed: the gaps between their places, and their differences
    dense   where many did: the differences of all items
    raw     the new bytes themselves, when neither is smaller

Differences are stored byte plane by byte plane, lowest bytes first; one of nothing but zeros is left out, and what is left
is zstd's.

Pure functions of their arguments; what is decoded has to be compared with a digest by whoever knows it.
"""

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import zstandard

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
_FAR = 255
"""A gap of so many items or more stands apart, as 4 bytes."""
_ZSTD = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=10)
"""Differences hardly repeat: a small search leaves the time to the entropy coder, which does the work."""
_COUNT = np.dtype("<u4")
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


class DeltaCodec:
    """Keeps the buffers of its library between calls: for one thread at a time."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(compression_params=_ZSTD)
        self._decompressor = zstandard.ZstdDecompressor()

    def encode(self, base: Buffer, target: Buffer, item_bytes: int) -> "tuple[ChunkEncoding.ValueType, Buffer]":
        """The difference from `base` to `target`, never longer than `target`.

        Args:
            base, target: of one length.
            item_bytes: size of the dtype's items: 1, 2, 4 or 8. Any other than the true one costs bytes, not exactness.
        """
        old, new = _items(base, item_bytes), _items(target, item_bytes)
        changed = old != new
        if np.count_nonzero(changed) <= _SPARSE_SHARE * len(new):
            encoding, data = CHUNK_ENCODING_SPARSE_DELTA, self._encode_sparse(np.flatnonzero(changed), old, new)
        else:
            encoding, data = CHUNK_ENCODING_DENSE_DELTA, self._encode_dense(old, new)
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
        far = gaps[gaps >= _FAR].astype(_COUNT)
        counts = np.array([len(places), len(far)], _COUNT)
        parts = (
            np.minimum(gaps, _FAR).astype(np.uint8),
            far.view(np.uint8),
            *_planes(_zigzag(old[places], new[places])),
        )
        return counts.tobytes() + self._compressor.compress(np.concatenate(parts).data)

    def _decode_sparse(self, data: Buffer, old: _Items) -> _Items:
        counts = np.frombuffer(data, _COUNT, 2)
        num_places, num_far = int(counts[0]), int(counts[1])
        if not num_far <= num_places <= len(old):
            raise ValueError(f"{num_places} changes in {len(old)} items")
        num_bytes = num_places * (1 + old.itemsize) + num_far * _COUNT.itemsize
        parts = self._decompress(memoryview(data)[counts.nbytes :], num_bytes)
        near, far, planes = np.split(parts, [num_places, num_places + num_far * _COUNT.itemsize])
        gaps = near.astype(np.intp)
        gaps[near == _FAR] = far.view(_COUNT)
        places = np.cumsum(gaps)
        new = old.copy()
        new[places] = _undo_zigzag(old[places], _from_planes(planes.reshape(old.itemsize, num_places), old.dtype))
        return new

    def _encode_dense(self, old: _Items, new: _Items) -> bytes:
        planes = np.zeros((old.itemsize, len(old)), np.uint8)
        used_bits = 0
        for block in _blocks(len(old)):
            difference = _zigzag(old[block], new[block])
            bits = int(np.bitwise_or.reduce(difference))
            used_bits |= bits
            for place, plane in enumerate(planes):
                if _uses(bits, place):
                    plane[block] = _bytes_of(difference)[:, place]
        parts = [self._pack(plane) if _uses(used_bits, place) else b"" for place, plane in enumerate(planes)]
        lengths = np.array([len(part) for part in parts], _COUNT)
        return b"".join((lengths.tobytes(), *parts))

    def _decode_dense(self, data: Buffer, old: _Items) -> _Items:
        lengths = np.frombuffer(data, _COUNT, old.itemsize)
        planes: dict[int, _Bytes] = {}
        at = lengths.nbytes
        for place, length in enumerate(map(int, lengths)):
            if length > 0:
                planes[place] = self._unpack(memoryview(data)[at : at + length], length, len(old))
                at += length
        new = np.empty_like(old)
        for block in _blocks(len(old)):
            difference = np.zeros_like(old[block])
            for place, plane in planes.items():
                _bytes_of(difference)[:, place] = plane[block]
            new[block] = _undo_zigzag(old[block], difference)
        return new

    def _pack(self, plane: _Bytes) -> Buffer:
        """A plane as it takes fewest bytes: at its full length it is as it was."""
        if _is_worth_packing(plane) and len(packed := self._compressor.compress(plane.data)) < len(plane):
            return packed
        return plane.data

    def _unpack(self, part: Buffer, length: int, num_bytes: int) -> _Bytes:
        """
        Raises:
            ValueError: it holds another number of bytes.
        """
        if length != num_bytes:
            return self._decompress(part, num_bytes)
        plane = np.frombuffer(part, np.uint8)
        if len(plane) != num_bytes:
            raise ValueError(f"{len(plane)} bytes where {num_bytes} were expected")
        return plane

    def _decompress(self, frame: Buffer, num_bytes: int) -> _Bytes:
        """
        Raises:
            ValueError: it says of itself that it holds another number of bytes; nothing is allocated for those.
        """
        said_bytes = zstandard.frame_content_size(frame)
        if said_bytes != num_bytes:
            raise ValueError(f"{said_bytes} bytes where {num_bytes} were expected")
        return np.frombuffer(self._decompressor.decompress(frame), np.uint8)


def _items(data: Buffer, item_bytes: int) -> _Items:
    """The data as integers; as single bytes, when a stretch ends inside an item."""
    return np.frombuffer(data, f"<u{item_bytes if len(data) % item_bytes == 0 else 1}")


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


def _planes(items: _Items) -> _Bytes:
    """[item size, items]: the lowest bytes of all items, then the next, and so on."""
    return np.ascontiguousarray(_bytes_of(items).T)


def _from_planes(planes: _Bytes, dtype: "np.dtype[np.unsignedinteger]") -> _Items:
    """
    Args:
        planes: [item size, items].
    """
    return planes.T.copy(order="C").view(dtype).reshape(-1)


def _uses(bits: int, place: int) -> bool:
    """Whether any of these bits is in the byte at a place."""
    return bits >> (8 * place) & 0xFF != 0


_BLOCK_ITEMS = 32 * 1024
"""So many items at a time stay in a core's own cache from one operation to the next."""


def _blocks(num_items: int) -> Iterator[slice]:
    return (slice(first, first + _BLOCK_ITEMS) for first in range(0, num_items, _BLOCK_ITEMS))


_SAMPLE_BYTES = 4096


def _is_worth_packing(plane: _Bytes) -> bool:
    """Whether the values of a plane are uneven enough: packing noise takes long and gains nothing."""
    sample = plane[:: max(1, len(plane) // _SAMPLE_BYTES)]
    shares = np.bincount(sample, minlength=256) / len(sample)
    shares = shares[shares > 0]
    bits = -float(np.sum(shares * np.log2(shares)))
    return bits < 7.0
