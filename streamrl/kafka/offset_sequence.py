"""Whether a reader has been given every record: the offsets of our topics have no holes.

No topic of ours is compacted or written in transactions, so an offset that is passed over is a record that the broker
did not show. The embedded broker does that now and then: a fetch between two producers' writes may see the later one
and not the earlier, which a second look finds. A hole that stays (retention took it, or a topic's owner compacts) is
accepted after a few looks. Pure state; the reader seeks.
"""

_LOOKS = 3


class OffsetSequence:
    """What is expected next in each partition of a topic."""

    def __init__(self, first: dict[int, int]) -> None:
        """
        Args:
            first: partition to the first offset that is wanted.
        """
        self._expected = dict(first)
        self._looks: dict[int, int] = {}
        self._seeking: set[int] = set()

    def accepts(self, partition: int, offset: int) -> bool:
        """Whether a record is to be taken. Each record is taken once at most, and in order."""
        expected = self._expected.setdefault(partition, offset)
        if offset < expected or partition in self._seeking:
            return False
        if offset > expected:
            looks = self._looks.get(partition, 0)
            if looks < _LOOKS:
                self._looks[partition] = looks + 1
                self._seeking.add(partition)
                return False
        self._looks.pop(partition, None)
        self._expected[partition] = offset + 1
        return True

    def take_seeks(self) -> dict[int, int]:
        """Partition to the offset to read again from; each is named once."""
        seeks = {partition: self._expected[partition] for partition in self._seeking}
        self._seeking.clear()
        return seeks
