"""The parts of the trainer's benchmark that compute."""

from benchmarks.trainer import growth, paired_times


def test_a_large_batch_is_no_growth_and_a_leak_is() -> None:
    assert growth([100.0] * 199 + [500.0]) == 0
    assert growth([100.0 + number for number in range(200)]) == 50


def test_both_sides_take_turns_and_change_who_begins() -> None:
    order: list[str] = []
    times = paired_times({"ours": lambda: order.append("ours"), "theirs": lambda: order.append("theirs")}, 2)
    assert order == ["ours", "theirs", "theirs", "ours"]
    assert {side: len(seconds) for side, seconds in times.items()} == {"ours": 2, "theirs": 2}
