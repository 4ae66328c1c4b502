"""When a batch may start, and what comes first. Pure functions.

The scheduler alone admits: what is bounded here is never above the bound later.
"""

from streamrl.identity import BatchKey
from streamrl.staleness import required_version

_VERSION_BITS, _BATCH_BITS, _LENGTH_BITS = 23, 15, 24


def version_for(key: BatchKey, max_staleness: int) -> int:
    """The weight version that must be announced before a batch starts: that of an evaluation exactly, of a training
    batch i the version i - k."""
    return key.batch if key.is_evaluation else required_version(key.batch, max_staleness)


def batch_order(key: BatchKey, max_staleness: int) -> tuple[int, bool, int]:
    """Sorts batches: by required version, evaluation before training, then by batch."""
    return version_for(key, max_staleness), not key.is_evaluation, key.batch


def priority(key: BatchKey, max_staleness: int, expected_tokens: int) -> int:
    """Orders one instance's work, lower first: as `batch_order`, then the longest expected first.

    Args:
        expected_tokens: expected length of an answer; 0 leaves the order of arrival.

    Returns:
        A number of 63 bits: version, training or not, batches after the version, length. What exceeds its field (8
        million versions, a staleness of 32 thousand, 16 million tokens) counts as the most that fits.
    """
    version, is_training, batch = batch_order(key, max_staleness)
    number = _clip(version, _VERSION_BITS)
    number = number << 1 | is_training
    number = number << _BATCH_BITS | _clip(batch - version, _BATCH_BITS)
    return number << _LENGTH_BITS | _clip((1 << _LENGTH_BITS) - 1 - expected_tokens, _LENGTH_BITS)


def _clip(number: int, bits: int) -> int:
    return max(0, min(number, (1 << bits) - 1))
