"""The exact difference between two versions of a stretch of a tensor, as few bytes: bit for bit reversible, any dtype.

Items are taken as unsigned integers of their size, and subtracted modulo 2^bits: neighbouring floats of one sign are
neighbouring integers, so a small step of training is a small number, whatever the dtype. The sign goes into the lowest
bit (zigzag). Then, whichever suits:

    sparse  where few items changed: the gaps between their places, and their differences
    dense   where many did: the differences of all items
    raw     the new bytes themselves, when neither is smaller

Differences are stored byte plane by byte plane, lowest bytes first, and what is left is zstd's.

Pure functions of their arguments; what is decoded has to be compared with a digest by whoever knows it.
"""

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
        parts = []
        for plane in _planes(_zigzag(old, new)):
            packed = self._compressor.compress(plane.data) if _is_worth_packing(plane) else plane.tobytes()
            parts.append(packed if len(packed) < len(plane) else plane.tobytes())
        lengths = np.array([len(part) for part in parts], _COUNT)
        return b"".join((lengths.tobytes(), *parts))

    def _decode_dense(self, data: Buffer, old: _Items) -> _Items:
        lengths = np.frombuffer(data, _COUNT, old.itemsize)
        planes = np.empty((old.itemsize, len(old)), np.uint8)
        at = lengths.nbytes
        for plane, length in zip(planes, map(int, lengths), strict=True):
            part = memoryview(data)[at : at + length]
            at += length
            plane[:] = np.frombuffer(part, np.uint8) if length == len(old) else self._decompress(part, len(old))
        return _undo_zigzag(old, _from_planes(planes, old.dtype))

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
    signed = _SIGNED[old.itemsize]
    difference = (new - old).view(signed)
    return ((difference << 1) ^ (difference >> (8 * old.itemsize - 1))).view(old.dtype)


def _undo_zigzag(old: _Items, difference: _Items) -> _Items:
    """old + the difference that `_zigzag` gave."""
    signed = _SIGNED[old.itemsize]
    sign = -(difference & 1).view(signed)
    return old + ((difference >> 1) ^ sign.view(old.dtype))


def _planes(items: _Items) -> _Bytes:
    """[item size, items]: the lowest bytes of all items, then the next, and so on."""
    return np.ascontiguousarray(items.view(np.uint8).reshape(-1, items.itemsize).T)


def _from_planes(planes: _Bytes, dtype: "np.dtype[np.unsignedinteger]") -> _Items:
    """
    Args:
        planes: [item size, items].
    """
    items: _Items = planes[0].astype(dtype)
    for place in range(1, len(planes)):
        if planes[place].any():
            items |= planes[place].astype(dtype) << (8 * place)
    return items


_SAMPLE_BYTES = 4096


def _is_worth_packing(plane: _Bytes) -> bool:
    """Whether the values of a plane are uneven enough: packing noise takes long and gains nothing."""
    sample = plane[:: max(1, len(plane) // _SAMPLE_BYTES)]
    shares = np.bincount(sample, minlength=256) / len(sample)
    shares = shares[shares > 0]
    bits = -float(np.sum(shares * np.log2(shares)))
    return bits < 7.0
