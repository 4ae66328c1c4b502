"""Stretches of bytes that are uneven in some way or other, as few bytes: how the planes of a difference are stored.

    ABSENT   nothing but zeros: takes nothing
    NOISE    as it is: packing would take long and gain nothing
    PACKED   by zstd
    HALVES   nearly all are below 15: two to a byte, those that are not behind them, by zstd. For small numbers this is
             a fifth smaller than zstd alone, and up to three times as fast: an entropy coder that spends a bit at least
             on each byte has half as many of them, and looks in vain for repetitions half as long.

Which suits is told from a sample; each can hold any bytes.
"""

from enum import IntEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import zstandard

Buffer: TypeAlias = bytes | memoryview
Bytes: TypeAlias = "npt.NDArray[np.uint8]"

_ZSTD = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=10)
"""Differences hardly repeat: a small search leaves the time to the entropy coder, which does the work."""
_NOISE_BITS = 6.5
"""From so many bits of information a byte on packing takes more time than its gain is worth."""
_MOSTLY_ZERO = 0.85
"""From such a share of zeros on zstd is fastest by itself."""
_ESCAPE = 15
_MOST_ESCAPES = 1 / 16


class Form(IntEnum):
    """How a plane is stored."""

    ABSENT = 0
    NOISE = 1
    PACKED = 2
    HALVES = 3


def form_of(sample: Bytes) -> Form:
    """What suits a plane of which this is a part; ABSENT is not told from a part."""
    counts = np.bincount(sample, minlength=256)
    if counts[0] >= _MOSTLY_ZERO * len(sample):
        return Form.PACKED
    if counts[_ESCAPE:].sum() <= _MOST_ESCAPES * len(sample):
        return Form.HALVES
    used = counts[counts > 0]
    bits = np.log2(len(sample)) - float(used @ np.log2(used)) / len(sample)
    return Form.NOISE if bits >= _NOISE_BITS else Form.PACKED


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
    escapes = plane[np.flatnonzero(plane >= _ESCAPE)]
    small = np.minimum(plane, _ESCAPE)
    if len(small) % 2:
        small = np.append(small, np.uint8(0))
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
    places = np.flatnonzero(plane == _ESCAPE)
    if len(places) != len(halves) - num_pairs:
        raise ValueError(f"{len(halves) - num_pairs} bytes where {len(places)} were expected")
    plane[places] = halves[num_pairs:]
    return plane
