"""Plans for the least expected makespan: whole, and as good as they promise."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.paper_workload import TOKEN_LATENCY, draw_lengths, log_normal_error, overlooked_tail
from streamrl.planning.completion import Work, steps_within
from streamrl.planning.forecast import LengthForecast
from streamrl.planning.makespan import FleetMember, plan_makespan
from streamrl.planning.profile import InstanceProfile, TokenLatency
from streamrl.planning.simulated_fleet import makespan_s
from streamrl.planning.simulated_instance import SimulatedSequence


def work_of(forecast: LengthForecast, num_samples: int = 1) -> Work:
    size = len(forecast)
    return Work(forecast, np.full(size, num_samples, dtype=np.int64), np.zeros(size))


def played_s(shares: list[list[int]], lengths: np.ndarray, profiles: list[InstanceProfile]) -> float:
    sequences = [
        [SimulatedSequence(index, int(lengths[index]), -lengths[index]) for index in share] for share in shares
    ]
    return makespan_s(sequences, profiles)


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 20_000), max_size=80),
    st.lists(st.tuples(st.sampled_from([1, 8, 64]), st.integers(0, 50_000)), min_size=1, max_size=6),
    st.integers(1, 4),
)
def test_a_plan_holds_every_prompt_once(lengths: list[int], fleet: list[tuple[int, int]], num_samples: int) -> None:
    profiles = {size: InstanceProfile(TOKEN_LATENCY, size, kv_cache_tokens=100_000) for size, _ in fleet}
    members = [FleetMember(profiles[size], before) for size, before in fleet]
    plan = plan_makespan(work_of(LengthForecast.exact(np.array(lengths, dtype=float)), num_samples), members)
    assert sorted(index for share in plan.shares for index in share) == list(range(len(lengths)))
    assert np.isfinite(plan.expected_s)


@pytest.mark.parametrize(("num_instances", "batch_limit"), [(4, 256), (16, 64), (64, 64)])
@pytest.mark.parametrize("held_token_s", [0.0, 2e-8])
def test_known_lengths_take_as_long_as_promised_and_less_than_dealt_in_turn(
    num_instances: int, batch_limit: int, held_token_s: float
) -> None:
    lengths = draw_lengths(1024, np.random.default_rng(3))
    profile = InstanceProfile(TOKEN_LATENCY, batch_limit, held_token_s=held_token_s)
    plan = plan_makespan(work_of(LengthForecast.exact(lengths.astype(float))), [FleetMember(profile)] * num_instances)
    profiles = [profile] * num_instances
    found_s = played_s(plan.shares, lengths, profiles)
    by_length = np.argsort(-lengths).tolist()
    dealt_s = played_s([by_length[turn::num_instances] for turn in range(num_instances)], lengths, profiles)
    assert found_s == pytest.approx(plan.expected_s, rel=0.05)
    assert found_s < 0.97 * dealt_s


def test_uncertain_lengths_are_weighed() -> None:
    generator = np.random.default_rng(5)
    profile = InstanceProfile(TOKEN_LATENCY, 64, held_token_s=2e-8)
    promised, found = [], []
    for _ in range(3):
        lengths = draw_lengths(512, generator)
        _, forecast = log_normal_error(lengths, generator)
        plan = plan_makespan(work_of(forecast), [FleetMember(profile)] * 16)
        promised.append(plan.expected_s)
        found.append(played_s(plan.shares, lengths, [profile] * 16))
    assert np.mean(found) == pytest.approx(np.mean(promised), rel=0.05)


def test_a_small_cache_is_no_place_for_many_long_answers() -> None:
    lengths = np.full(64, 10_000)
    large = InstanceProfile(TOKEN_LATENCY, 64)
    small = InstanceProfile(TOKEN_LATENCY, 64, kv_cache_tokens=40_000)
    work = work_of(LengthForecast.exact(lengths.astype(float)))
    plan = plan_makespan(work, [FleetMember(small)] * 2)
    assert plan.expected_s > 2 * plan_makespan(work, [FleetMember(large)] * 2).expected_s


def test_who_has_much_to_do_gets_less() -> None:
    profile = InstanceProfile(TOKEN_LATENCY, 4)
    work = work_of(LengthForecast.exact(np.full(40, 100.0)))
    plan = plan_makespan(work, [FleetMember(profile, 2000.0), FleetMember(profile)])
    assert len(plan.shares[0]) < len(plan.shares[1])


@given(st.floats(0.1, 1000), st.floats(0, 1e6), st.floats(0, 1e9), st.sampled_from([1, 64, 512]), st.booleans())
def test_steps_solve_their_equation(time_s: float, tokens: float, held: float, size: int, proportional: bool) -> None:
    latency = TokenLatency({1: 0.01, 512: 5.12}) if proportional else TOKEN_LATENCY
    profile = InstanceProfile(latency, size, held_token_s=1e-9)
    steps = float(steps_within(profile, time_s, tokens, held))
    if steps > 0:
        mean_batch = np.array(min(max(tokens / steps, 1.0), size))
        again_s = steps * float(latency.of_means(mean_batch)) + 1e-9 * held
        assert again_s == pytest.approx(time_s)


@pytest.mark.parametrize("slowest", [0.16, 0.32, 0.64])
def test_where_larger_batches_hardly_pay_plans_are_no_worse_than_dealt_in_turn(slowest: float) -> None:
    """Steps of 64 that take 16 to 64 times as long as those of one: processors, and large models."""
    profile = InstanceProfile(TokenLatency({1: 0.01, 64: slowest}), 64)
    lengths = np.where(np.random.default_rng(3).random(150) < 0.05, 20_000, 300)
    plan = plan_makespan(work_of(LengthForecast.exact(lengths.astype(float))), [FleetMember(profile)] * 4)
    by_length = np.argsort(-lengths, kind="stable").tolist()
    dealt_s = played_s([by_length[turn::4] for turn in range(4)], lengths, [profile] * 4)
    assert played_s(plan.shares, lengths, [profile] * 4) <= dealt_s


def test_answers_that_may_be_wrong_in_the_same_way_are_not_put_together() -> None:
    generator = np.random.default_rng(4)
    lengths = draw_lengths(2048, generator)
    estimates, forecast = overlooked_tail(lengths, generator)
    profile = InstanceProfile(TOKEN_LATENCY, 256, held_token_s=2e-8)
    plan = plan_makespan(work_of(forecast), [FleetMember(profile)] * 16)
    wrong, doubtful = lengths > estimates, forecast.lengths[:, -1] > estimates
    for share in plan.shares:
        if doubtful[share].sum() >= 20:
            assert wrong[share].sum() < 0.5 * doubtful[share].sum()


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_beside_an_instance_that_hardly_moves_others_get_the_work() -> None:
    fast, slow = (InstanceProfile(TokenLatency({1: step_s}), 64) for step_s in (1e-6, 1e6))
    plan = plan_makespan(work_of(LengthForecast.exact(np.full(40, 300.0))), [FleetMember(fast), FleetMember(slow)])
    assert sorted(plan.shares[0]) == list(range(40))
    assert plan.shares[1] == []
    assert np.isfinite(plan.expected_s)
