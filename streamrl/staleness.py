"""The staleness bound (paper section 2, Fig 5d): pure functions, used where a batch is admitted and where a rollout is
accepted."""

from collections.abc import Iterable


def required_version(batch: int, max_staleness: int) -> int:
    """The oldest weight version that a batch may be generated with: batch i starts when version i - k is announced."""
    return max(batch - max_staleness, 0)


def staleness(batch: int, versions: Iterable[int]) -> int:
    """Batch index minus the oldest weight version among a rollout's tokens.

    Raises:
        ValueError: no version, or a version newer than the trainer had when the batch began (negative staleness).
    """
    oldest, newest = _range(versions)
    if newest > batch:
        raise ValueError(f"a token of batch {batch} comes from weight version {newest}, which is made from that batch")
    return batch - oldest


def _range(versions: Iterable[int]) -> tuple[int, int]:
    ordered = sorted(versions)
    if not ordered:
        raise ValueError("expected at least one weight version, got none")
    return ordered[0], ordered[-1]
