"""Profiles from heartbeats."""

import pytest

from scheduler_svc.observed_latency import ObservedLatency, fleet_profiles
from scheduler_svc.registry import Life
from streamrl.v1.scheduler_pb2 import HeartbeatRequest, RegisterRequest, StepLatency


def beat(*latencies: tuple[int, float, int]) -> HeartbeatRequest:
    return HeartbeatRequest(
        step_latencies=[
            StepLatency(batch_size=size, latency_s=seconds, num_steps=steps) for size, seconds, steps in latencies
        ]
    )


def life(name: str, *latencies: tuple[int, float, int], max_running: int = 8) -> Life:
    request = RegisterRequest(instance=name, max_running=max_running, kv_cache_tokens=1000)
    made = Life(request, incarnation=1, partition=0, lease_s=10.0, heard_at=0.0)
    made.hear(beat(*latencies), now=1.0)
    return made


def test_nothing_is_known_before_the_first_step() -> None:
    assert ObservedLatency().token_latency() is None
    assert fleet_profiles([life("a")]) == {}


def test_latencies_are_means_over_the_last_steps() -> None:
    observed = ObservedLatency()
    observed.take(beat((8, 0.2, 10), (1, 0.1, 10)).step_latencies)
    observed.take(beat((8, 0.4, 10)).step_latencies)
    latency = observed.token_latency()
    assert latency is not None
    assert (latency(1), latency(8)) == pytest.approx((0.1, 0.3))
    for _ in range(5):
        observed.take(beat((8, 0.9, 5000)).step_latencies)
    later = observed.token_latency()
    assert later is not None
    assert later(8) == pytest.approx(0.9, rel=0.02)


def test_a_larger_batch_is_never_taken_to_be_faster() -> None:
    observed = ObservedLatency()
    observed.take(beat((1, 0.3, 10), (8, 0.2, 10)).step_latencies)
    latency = observed.token_latency()
    assert latency is not None
    assert latency(8) == pytest.approx(0.3)


def test_figures_that_make_no_sense_are_passed_over() -> None:
    observed = ObservedLatency()
    observed.take(beat((0, 0.3, 10), (8, -1.0, 10), (8, 0.2, 0)).step_latencies)
    assert observed.token_latency() is None


def test_instances_that_are_about_equally_fast_share_a_profile() -> None:
    fast, noisy = life("a", (1, 0.1, 50), (8, 0.2, 50)), life("b", (1, 0.105, 50), (8, 0.21, 50))
    slow, new, small = life("c", (1, 0.2, 50), (8, 0.4, 50)), life("d"), life("e", max_running=4)
    profiles = fleet_profiles([fast, noisy, slow, new, small])
    assert profiles["a"] is profiles["b"] is profiles["d"]
    assert profiles["c"] is not profiles["a"]
    assert profiles["c"].token_latency(8) == pytest.approx(0.4)
    assert profiles["a"].kv_cache_tokens == 1000
    assert "e" not in profiles
