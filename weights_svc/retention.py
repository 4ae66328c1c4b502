"""Which versions may go: a pure function."""

from collections.abc import Collection


def retired(
    held: Collection[int], keep_versions: int, in_use: Collection[int], bases: Collection[int] = ()
) -> list[int]:
    """The versions that nobody needs any more, oldest first.

    Args:
        held: the versions there are.
        keep_versions: how many of the newest stay in any case.
        in_use: versions that a receiver is fetching, or is about to.
        bases: versions that others are adapters of: whoever joins late needs them.
    """
    return [version for version in sorted(held)[:-keep_versions] if version not in in_use and version not in bases]
