"""Step durations by batch size."""

import pytest

from generator_svc.step_latencies import StepLatencies


def test_sizes_share_a_bucket_up_to_the_next_power_of_two() -> None:
    latencies = StepLatencies()
    for size, duration_s in ((1, 0.001), (3, 0.002), (4, 0.004), (64, 0.01)):
        latencies.add(size, duration_s)
    assert latencies.take() == [(1, 0.001, 1, 0), (4, pytest.approx(0.003), 2, 0), (64, 0.01, 1, 0)]


def test_what_was_taken_is_forgotten() -> None:
    latencies = StepLatencies()
    latencies.add(2, 0.5)
    latencies.take()
    assert latencies.take() == []


def test_steps_noted_in_parts_add_up() -> None:
    latencies = StepLatencies()
    latencies.add(2, 0.25, 0.25, held_tokens=40.0)
    latencies.add(2, 1.75, 1.75, held_tokens=80.0)
    assert latencies.take() == [(2, 1.0, 2, 75.0)]
