"""The parts of the trainer's benchmark that compute."""

import os
from dataclasses import replace

import pytest

from benchmarks.trainer import WORKLOADS, compared_cells, growth, paired_times
from trainer_svc.ranks import join_ranks


def test_a_large_batch_is_no_growth_and_a_leak_is() -> None:
    assert growth([100.0] * 199 + [500.0]) == 0
    assert growth([100.0 + number for number in range(200)]) == 50


def test_both_sides_take_turns_and_change_who_begins() -> None:
    order: list[str] = []
    times = paired_times({"ours": lambda: order.append("ours"), "theirs": lambda: order.append("theirs")}, 2)
    assert order == ["ours", "theirs", "theirs", "ours"]
    assert {side: len(seconds) for side, seconds in times.items()} == {"ours": 2, "theirs": 2}


@pytest.mark.slow
def test_both_sides_make_the_same_step_of_the_same_batch() -> None:
    workload = replace(WORKLOADS[0], num_prompts=16, longest_answer=32, num_turns=1)
    with join_ranks(1, [], os.environ) as ranks:
        cells = {cell.name: cell for cell in compared_cells(workload, ranks)}
    assert cells["laptop/distinct/tokens_per_s"].value > 0
    # Ours before clipping, over the plain loop's.
    assert cells["laptop/distinct/first_gradient_norm"].ratio == pytest.approx(1.0, rel=1e-4)
