from hypothesis import given
from hypothesis import strategies as st

from streamrl.kafka.offset_sequence import OffsetSequence


def read(sequence: OffsetSequence, shown: list[list[int]]) -> tuple[list[int], list[int]]:
    """Offers one partition's offsets, fetch by fetch. Returns what was taken and where it was to be read again."""
    taken: list[int] = []
    seeks: list[int] = []
    for fetch in shown:
        taken += [offset for offset in fetch if sequence.accepts(0, offset)]
        seeks += sequence.take_seeks().values()
    return taken, seeks


def test_a_record_that_was_passed_over_is_read_again_from_there() -> None:
    taken, seeks = read(OffsetSequence({0: 0}), [[0, 1, 3, 4], [2, 3, 4, 5]])

    assert taken == [0, 1, 2, 3, 4, 5]
    assert seeks == [2]


def test_a_hole_that_stays_is_accepted() -> None:
    taken, seeks = read(OffsetSequence({0: 0}), [[0, 5]] + [[5, 6]] * 3)

    assert taken == [0, 5, 6]
    assert seeks == [1, 1, 1]


def test_records_from_before_the_wanted_position_are_left_out() -> None:
    assert read(OffsetSequence({0: 7}), [[5, 6, 7, 8]]) == ([7, 8], [])


def test_partitions_are_counted_apart() -> None:
    sequence = OffsetSequence({0: 0, 1: 0})

    assert not sequence.accepts(0, 1)
    assert sequence.accepts(1, 0)
    assert sequence.take_seeks() == {0: 0}
    assert sequence.take_seeks() == {}


@given(
    num_records=st.integers(1, 60),
    hidden=st.lists(st.integers(0, 59), max_size=10),
    fetch_size=st.integers(1, 20),
)
def test_every_record_is_taken_once_and_in_order_whatever_a_fetch_hides(
    num_records: int, hidden: list[int], fetch_size: int
) -> None:
    """A broker that hides each of `hidden` from the first fetch that reaches it."""
    sequence = OffsetSequence({0: 0})
    still_hidden, position, taken = set(hidden), 0, list[int]()
    while position < num_records:
        fetch = [offset for offset in range(position, num_records) if offset not in still_hidden][:fetch_size]
        still_hidden -= set(range(position, fetch[-1] if fetch else num_records))
        if not fetch:
            continue
        taken += [offset for offset in fetch if sequence.accepts(0, offset)]
        position = fetch[-1] + 1
        for offset in sequence.take_seeks().values():
            position = offset

    assert taken == list(range(num_records))
