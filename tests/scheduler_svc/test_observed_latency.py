"""Profiles from heartbeats."""

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression

from scheduler_svc.observed_latency import ObservedLatency, fleet_profiles, rising
from scheduler_svc.registry import Life
from streamrl.v1.scheduler_pb2 import EngineProfile, HeartbeatRequest, RegisterRequest, StepLatency


def beat(*latencies: tuple[int, float, int]) -> HeartbeatRequest:
    return HeartbeatRequest(
        step_latencies=[
            StepLatency(batch_size=size, latency_s=seconds, num_steps=steps) for size, seconds, steps in latencies
        ]
    )


def life(
    name: str, *latencies: tuple[int, float, int], max_running: int = 8, profile: EngineProfile | None = None
) -> Life:
    request = RegisterRequest(instance=name, max_running=max_running, kv_cache_tokens=1000, profile=profile)
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
    observed.take(beat((1, 0.3, 10), (8, 0.2, 30)).step_latencies)
    latency = observed.token_latency()
    assert latency is not None
    assert (latency(1), latency(8)) == pytest.approx((0.225, 0.225))


@given(st.lists(st.tuples(st.floats(0.01, 10), st.floats(0.1, 100)), min_size=1, max_size=8))
def test_rising_is_isotonic_regression(observed: list[tuple[float, float]]) -> None:
    values, weights = zip(*observed, strict=True)
    expected = isotonic_regression(values, weights=weights).x
    assert rising(values, weights) == pytest.approx(list(expected), rel=1e-6)


def test_instances_are_unlike_only_where_that_is_more_than_noise() -> None:
    def seen(name: str, seconds: list[float]) -> Life:
        made = life(name)
        for one in seconds:
            made.latency.take(beat((8, one, 20)).step_latencies)
        return made

    noisy = [0.1, 0.2, 0.1, 0.16, 0.09, 0.18]
    slower = [1.3 * one for one in noisy]
    profiles = fleet_profiles([seen("a", noisy), seen("b", slower)])
    assert profiles["a"] is profiles["b"]
    steady = fleet_profiles([seen("a", [0.1] * 6), seen("b", [0.13] * 6)])
    assert steady["a"] is not steady["b"]
    in_the_long_run = fleet_profiles([seen("a", 40 * noisy), seen("b", [2 * one for one in 40 * noisy])])
    assert in_the_long_run["a"] is not in_the_long_run["b"]


def test_figures_that_make_no_sense_are_passed_over() -> None:
    observed = ObservedLatency()
    observed.take(beat((0, 0.3, 10), (8, -1.0, 10), (8, 0.2, 0)).step_latencies)
    observed.take(beat((8, inf, 10), (8, nan, 10), (8, 1e200, 10)).step_latencies)
    observed.take([StepLatency(batch_size=8, latency_s=0.2, num_steps=10, held_tokens=nan)])
    assert observed.token_latency() is None
    step = StepLatency(batch_size=8, latency_s=0.2, num_steps=1, held_tokens=10)
    for held, prefill in ((nan, -1.0), (inf, nan), (-1.0, inf)):
        measured = ObservedLatency(EngineProfile(steps=[step], held_token_s=held, prefill_token_s=prefill))
        latency = measured.token_latency()
        assert latency is not None
        assert (latency(8), measured.held_token_s, measured.prefill_token_s) == (pytest.approx(0.2), 0.0, 0.0)


def test_an_engine_that_stood_still_once_is_not_noisy_for_ever() -> None:
    stopped = life("a", *20 * [(8, 0.1, 20)])
    stopped.latency.take(beat((8, 12.0, 20)).step_latencies)
    for _ in range(500):
        stopped.latency.take(beat((8, 0.1, 20)).step_latencies)
    profiles = fleet_profiles([stopped, life("b", *20 * [(8, 0.2, 20)])])
    assert profiles["a"] is not profiles["b"]


def test_instances_that_are_about_equally_fast_share_a_profile() -> None:
    fast, noisy = life("a", (1, 0.1, 50), (8, 0.2, 50)), life("b", (1, 0.105, 50), (8, 0.21, 50))
    slow, new, small = life("c", (1, 0.2, 50), (8, 0.4, 50)), life("d"), life("e", max_running=4)
    profiles = fleet_profiles([fast, noisy, slow, new, small])
    assert profiles["a"] is profiles["b"] is profiles["d"]
    assert profiles["c"] is not profiles["a"]
    assert profiles["c"].token_latency(8) == pytest.approx(0.4)
    assert profiles["a"].kv_cache_tokens == 1000
    assert "e" not in profiles


def test_planning_begins_with_what_was_measured_and_goes_on_with_what_is_seen() -> None:
    measured = EngineProfile(
        steps=[StepLatency(batch_size=size, latency_s=0.1 * size, num_steps=1) for size in (1, 8)],
        held_token_s=0.001,
        prefill_token_s=0.01,
    )
    profile = fleet_profiles([life("a", profile=measured)])["a"]
    assert (profile.token_latency(1), profile.token_latency(8)) == pytest.approx((0.1, 0.8))
    assert (profile.held_token_s, profile.prefill_token_s) == (0.001, 0.01)
    slower = life("a", profile=measured)
    for _ in range(20):
        slower.latency.take([StepLatency(batch_size=8, latency_s=1.5, num_steps=1000, held_tokens=500.0)])
    latency = slower.latency.token_latency()
    assert latency is not None
    # A third of what the steps take is from the tokens in the cache.
    assert latency(8) == pytest.approx(1.0, rel=0.05)
    assert latency(1) == pytest.approx(0.1)


def test_instances_that_differ_only_in_what_the_cache_or_prompts_cost_are_not_alike() -> None:
    steps = [StepLatency(batch_size=size, latency_s=0.1, num_steps=1) for size in (1, 8)]
    lives = [
        life(name, profile=EngineProfile(steps=steps, held_token_s=held, prefill_token_s=prefill))
        for name, held, prefill in (("a", 0.0, 0.01), ("b", 1e-6, 0.011), ("c", 1e-3, 0.01), ("d", 0.0, 0.03))
    ]
    profiles = fleet_profiles(lives)
    assert profiles["a"] is profiles["b"]
    assert len({id(profile) for profile in profiles.values()}) == 3
