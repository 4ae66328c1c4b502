"""Stretches of bytes that are uneven in some way or other, as few bytes: how the planes of a difference are stored.

    ABSENT   nothing but zeros: takes nothing
    NOISE    as it is: packing would take long and gain nothing
    PACKED   by zstd
    HALVES   nearly all are below 15: two to a byte, those that are not behind them, by zstd. For small numbers this is
             a fifth smaller than zstd alone, and up to three times as fast: an entropy coder that spends a bit at least
             on each byte has half as many of them, and looks in vain for repetitions half as long.

Which suits is told from a sample; each can hold any bytes.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import zstandard

Buffer: TypeAlias = bytes | memoryview
Bytes: TypeAlias = "npt.NDArray[np.uint8]"

_ZSTD = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=10)
"""Differences hardly repeat: a small search leaves the time to the entropy coder, which does the work."""
_NOISE_BITS = 6.0
"""From so many bits of information a byte on packing takes more time than its gain is worth."""
_MOSTLY_ZERO = 0.85
"""From such a share of zeros on zstd is fastest by itself."""
_ESCAPE = 15
_MOST_SAMPLED = 2048
_TIMES_LOG2 = np.arange(_MOST_SAMPLED + 1) * np.log2(np.maximum(np.arange(_MOST_SAMPLED + 1), 1))
"""n log2(n) by n: looked up, since logarithms would take as long as all the rest."""
_FEW = 0.1
"""Up to such a share numpy looks for what is set byte by byte."""
_MOST_ESCAPES = 1 / 16


class Form(IntEnum):
    """How a plane is stored."""

    ABSENT = 0
    NOISE = 1
    PACKED = 2
    HALVES = 3


def forms_of(sample: Bytes) -> Sequence[Form]:
    """What suits each plane, of which this is a part; ABSENT is not told from a part.

    Args:
        sample: [items, planes].
    """
    sample = sample[:_MOST_SAMPLED]
    num_items, num_planes = sample.shape
    marked = sample + 256 * np.arange(num_planes)
    counts = np.bincount(marked.reshape(-1), minlength=256 * num_planes).reshape(num_planes, 256)
    bits = np.log2(num_items) - _TIMES_LOG2[counts].sum(1) / num_items
    zeros, escapes = counts[:, 0], counts[:, _ESCAPE:].sum(1)
    return [_form(*shares) for shares in zip(zeros / num_items, escapes / num_items, bits, strict=True)]


def _form(zeros: float, escapes: float, bits: float) -> Form:
    """
    Args:
        zeros, escapes: shares.
        bits: of information a byte.
    """
    if zeros >= _MOSTLY_ZERO:
        return Form.PACKED
    if escapes <= _MOST_ESCAPES:
        return Form.HALVES
    return Form.NOISE if bits >= _NOISE_BITS else Form.PACKED


def places_of(marks: "npt.NDArray[np.bool_]") -> "npt.NDArray[np.intp]":
    """`np.flatnonzero`, in half the time where few are set: eight at a time, then those eight."""
    if len(marks) < 8 or np.count_nonzero(marks) > _FEW * len(marks):
        return np.flatnonzero(marks)
    whole = len(marks) // 8 * 8
    eights = marks[:whole].view(np.uint64)
    used = np.flatnonzero(eights != 0)
    inside = np.flatnonzero(eights[used].view(np.bool_))
    return np.concatenate(((used[inside >> 3] << 3) + (inside & 7), np.flatnonzero(marks[whole:]) + whole))


class PlanePacker:
    """Keeps the buffers of its library between calls: for one thread at a time."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(compression_params=_ZSTD)
        self._decompressor = zstandard.ZstdDecompressor()

    def pack(self, plane: Bytes, form: Form) -> Buffer:
        """The plane in a form; never longer than a few bytes more than it is."""
        match form:
            case Form.ABSENT:
                return b""
            case Form.NOISE:
                return plane.data
            case Form.PACKED:
                return self._compressor.compress(plane.data)
            case Form.HALVES:
                return self._compressor.compress(_halves(plane).data)

    def unpack(self, data: Buffer, form: Form, num_bytes: int) -> Bytes:
        """What `pack` was given, perhaps read-only.

        Raises:
            ValueError: it is not what a plane of this length was packed into.
            zstandard.ZstdError: it was damaged.
        """
        match form:
            case Form.ABSENT:
                return np.zeros(num_bytes, np.uint8)
            case Form.NOISE:
                plane = np.frombuffer(data, np.uint8)
            case Form.PACKED:
                plane = self._decompressed(data, num_bytes)
            case Form.HALVES:
                plane = _whole(self._decompressed(data, num_bytes // 2 + num_bytes + 1), num_bytes)
        if len(plane) != num_bytes:
            raise ValueError(f"{len(plane)} bytes where {num_bytes} were expected")
        return plane

    def _decompressed(self, frame: Buffer, most_bytes: int) -> Bytes:
        """
        Raises:
            ValueError: it says of itself that it holds more; nothing is allocated for that.
        """
        said_bytes = zstandard.frame_content_size(frame)
        if not 0 <= said_bytes <= most_bytes:
            raise ValueError(f"{said_bytes} bytes where {most_bytes} at most were expected")
        return np.frombuffer(self._decompressor.decompress(frame), np.uint8)


def _halves(plane: Bytes) -> Bytes:
    """Two to a byte, the even one in its lower half; then those that did not fit, in their order."""
    escapes = plane[places_of(plane >= _ESCAPE)]
    small = np.empty(len(plane) + len(plane) % 2, np.uint8)
    small[len(plane) :] = 0
    # An array of equal numbers: numpy takes ten times as long for the smaller of an array and one number.
    np.minimum(plane, np.full_like(plane, _ESCAPE), out=small[: len(plane)])
    pairs = small.view("<u2")
    return np.concatenate(((pairs | pairs >> 4).astype(np.uint8), escapes))


def _whole(halves: Bytes, num_bytes: int) -> Bytes:
    """What `_halves` was given.

    Raises:
        ValueError: there are more or fewer that did not fit than are marked.
    """
    num_pairs = (num_bytes + 1) // 2
    pairs = halves[:num_pairs].astype("<u2")
    plane: Bytes = ((pairs | pairs << 4) & 0x0F0F).view(np.uint8)[:num_bytes]
    places = places_of(plane == _ESCAPE)
    if len(places) != len(halves) - num_pairs:
        raise ValueError(f"{len(halves) - num_pairs} bytes where {len(places)} were expected")
    plane[places] = halves[num_pairs:]
    return plane
