"""What is made of paired runs."""

import numpy as np
import pytest

from benchmarks.laptop_dispatch import DispatchRun, cells, interval


def _run(generation_s: list[float], idle: float) -> DispatchRun:
    return DispatchRun({}, generation_s, [idle] * len(generation_s), [30.0] * len(generation_s))


def test_batches_are_paired_by_seed_and_index() -> None:
    theirs = [_run([2.0, 4.0, 3.0], 0.5), _run([3.0, 1.0, 2.0], 0.5)]
    ours = [_run([1.9, 3.9, 2.9], 0.4), _run([2.9, 0.9, 1.9], 0.6)]
    found = {cell.name: cell for cell in cells("emulated", {"makespan": ours, "round_robin": theirs})}
    assert found["emulated/makespan/generation"].ratio == pytest.approx(2.4 / 2.5)
    for way in ("by_seed", "by_batch"):
        assert found[f"emulated/generation/difference/{way}"].value == pytest.approx(-0.04)
        assert found[f"emulated/generation/difference/{way}"].met
    assert found["emulated/idle/trainer/difference/by_seed"].value == pytest.approx(0)
    assert not found["emulated/idle/trainer/difference/by_seed"].met


def test_an_interval_is_students() -> None:
    mean, half_width = interval(np.array([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert mean == 3
    # A standard deviation of 1.58 over five, and 2.776.
    assert half_width == pytest.approx(2.776 * 1.5811 / 5**0.5, rel=1e-3)
