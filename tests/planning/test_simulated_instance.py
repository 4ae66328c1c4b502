"""Simulated instances: step by step they do what an engine does, only faster."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.planning.profile import InstanceProfile, TokenLatency
from streamrl.planning.simulated_fleet import SimulatedFleet, makespan_s, run
from streamrl.planning.simulated_instance import SimulatedInstance, SimulatedSequence

PTL = TokenLatency({1: 1.0, 2: 1.5, 4: 2.0})


def step_by_step(lengths: list[int], profile: InstanceProfile) -> list[float]:
    """When each answer ends, the longest admitted first: one step after the other, as it is said in words."""
    waiting = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    running: dict[int, int] = {}
    ends, time_s = [0.0] * len(lengths), 0.0
    while waiting or running:
        while waiting and len(running) < profile.max_running:
            running[waiting.pop(0)] = 0
        # In the middle of a step each holds half a token more.
        held = sum(tokens + 0.5 for tokens in running.values())
        time_s += profile.token_latency(len(running)) + profile.held_token_s * held
        for index in list(running):
            running[index] += 1
            if running[index] == lengths[index]:
                del running[index]
                ends[index] = time_s
    return ends


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(1, 5), st.sampled_from([0.0, 0.01]))
def test_events_are_those_of_single_steps(lengths: list[int], max_running: int, held_token_s: float) -> None:
    profile = InstanceProfile(PTL, max_running, held_token_s=held_token_s)
    instance = SimulatedInstance(profile)
    for index, length in enumerate(lengths):
        instance.submit(SimulatedSequence(index, length, -length))
    found = {sequence.key: end_s for sequence, end_s in instance.advance(math.inf)}
    assert [found[index] for index in range(len(lengths))] == pytest.approx(step_by_step(lengths, profile))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.lists(st.floats(0.1, 9.0), max_size=12))
def test_it_does_not_matter_how_often_one_looks(lengths: list[int], looks: list[float]) -> None:
    watched, alone = (SimulatedInstance(InstanceProfile(PTL, 3, held_token_s=0.01)) for _ in range(2))
    for index, length in enumerate(lengths):
        for instance in (watched, alone):
            instance.submit(SimulatedSequence(index, length, index))
    ended = []
    for look in looks:
        ended += watched.advance(watched.time_s + look)
    ended += watched.advance(math.inf)
    assert [(sequence.key, pytest.approx(end_s)) for sequence, end_s in ended] == [
        (sequence.key, end_s) for sequence, end_s in alone.advance(math.inf)
    ]


def test_a_full_cache_drives_the_last_priority_out_and_its_tokens_are_computed_again() -> None:
    instance = SimulatedInstance(InstanceProfile(PTL, 4, kv_cache_tokens=20, prefill_token_s=0.1))
    for index in range(2):
        instance.submit(SimulatedSequence(index, 15, index))
    first, second = instance.advance(math.inf)
    assert (first[0].key, second[0].key) == (0, 1)
    # Ten steps for two, then five for the first alone, ten tokens again, and five for the second.
    assert (first[1], second[1]) == pytest.approx((10 * 1.5 + 5, 10 * 1.5 + 5 + 1 + 5))


def test_a_sequence_that_moves_goes_on_with_its_tokens_for_the_price_of_a_transfer_and_a_prefill() -> None:
    fleet = SimulatedFleet([InstanceProfile(PTL, 4, prefill_token_s=0.1)] * 2, transfer_s=3.0)
    fleet.submit(0, [SimulatedSequence("a", 30, 0), SimulatedSequence("b", 10, 0)])
    fleet.advance(15.0)
    assert fleet.move("a", 0, 1)
    assert not fleet.move("c", 0, 1)
    assert [(ending.key, ending.instance, ending.time_s) for ending in fleet.advance(100.0)] == [
        ("a", 1, pytest.approx(15 + 3 + 1 + 20)),
    ]
    assert (fleet.moved, fleet.moved_tokens, fleet.is_idle()) == (1, 10, True)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2)), min_size=1, max_size=15),
    st.lists(st.tuples(st.integers(0, 14), st.integers(0, 2), st.integers(0, 2)), max_size=30),
)
def test_every_sequence_ends_once_whatever_moves(
    answers: list[tuple[int, int]], moves: list[tuple[int, int, int]]
) -> None:
    fleet = SimulatedFleet([InstanceProfile(PTL, 2, kv_cache_tokens=50)] * 3, transfer_s=1.0)
    for index, (length, instance) in enumerate(answers):
        fleet.submit(instance, [SimulatedSequence(index, length, 0)])
    ended = []
    for key, source, target in moves:
        ended += fleet.advance(fleet.time_s + 2.5)
        fleet.move(key, source, target)
    ended += fleet.advance(1e6)
    assert sorted(int(str(ending.key)) for ending in ended) == list(range(len(answers)))
    assert fleet.is_idle()


def test_a_fleet_is_busy_as_long_as_its_last_instance() -> None:
    profiles = [InstanceProfile(PTL, 4)] * 2

    def shares() -> list[list[SimulatedSequence]]:
        return [[SimulatedSequence(0, 10, 0)], [SimulatedSequence(1, 30, 0), SimulatedSequence(2, 10, 0)]]

    assert makespan_s(shares(), profiles) == pytest.approx(10 * 1.5 + 20)
    fleet = SimulatedFleet(profiles)
    for instance, share in enumerate(shares()):
        fleet.submit(instance, share)
    assert run(fleet, lambda fleet: None, lambda now_s: 7.0) == pytest.approx(35.0)
