"""Plans for the end of an iteration: the times are those of engines and a trainer, and plans only become better."""

import math
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.planning.forecast import LEVELS
from streamrl.planning.iteration import Ends, IterationPlanner, Part, Share, TrainerPace
from streamrl.planning.profile import InstanceProfile, TokenLatency
from streamrl.planning.simulated_fleet import Ending, SimulatedFleet
from streamrl.planning.simulated_instance import SimulatedSequence

PTL = TokenLatency({1: 1.0, 2: 1.5, 4: 2.0, 16: 5.0})
PACE = TrainerPace(token_s=0.3, pass_tokens=50)

_PARTS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 8), st.integers(0, 9)), min_size=1, max_size=12).map(
    lambda rows: [
        Part(group, num_samples, prompt_tokens, (float(length),))
        for group, (length, num_samples, prompt_tokens) in enumerate(sorted(rows, reverse=True))
    ]
)


def dealt_in_turn(num_parts: int, num_instances: int) -> list[Share]:
    return [list(range(first, num_parts, num_instances)) for first in range(num_instances)]


def played(parts: list[Part], plan: list[Share], profiles: list[InstanceProfile]) -> list[Ending]:
    """What simulated engines make of a plan."""
    fleet = SimulatedFleet(profiles)
    for instance, share in enumerate(plan):
        for rank, index in enumerate(share):
            part = parts[index]
            fleet.submit(
                instance,
                [
                    SimulatedSequence((index, sample), int(part.lengths[0]), rank, part.prompt_tokens)
                    for sample in range(part.num_samples)
                ],
            )
    return fleet.advance(math.inf)


def trained_s(parts: list[Part], endings: list[Ending], pace: TrainerPace) -> float:
    """When a trainer is done that takes what is there as soon as it is enough for a pass, and the rest at the end."""
    settled: dict[int, float] = defaultdict(float)
    work: dict[int, float] = defaultdict(float)
    for ending in endings:
        part = parts[ending.key[0]]  # type: ignore[index]
        settled[part.group] = max(settled[part.group], ending.time_s)
        work[part.group] += part.lengths[0] + part.prompt_tokens
    left = sorted((time_s, group) for group, time_s in settled.items())
    now_s = 0.0
    while left:
        there = [group for time_s, group in left if time_s <= now_s]
        tokens = sum(work[group] for group in there)
        if there and (tokens >= pace.pass_tokens or len(there) == len(left)):
            now_s += tokens * pace.token_s
            left = left[len(there) :]
        else:
            now_s = left[len(there)][0]
    return now_s


@given(_PARTS, st.integers(2, 3), st.integers(1, 16), st.sampled_from([0.0, 0.01]))
def test_ends_are_those_of_engines_and_a_trainer(
    parts: list[Part], num_instances: int, max_running: int, held_token_s: float
) -> None:
    profile = InstanceProfile(PTL, max_running, held_token_s=held_token_s)
    profiles = [profile] * num_instances
    plan = dealt_in_turn(len(parts), num_instances)
    endings = played(parts, plan, profiles)
    found = IterationPlanner(parts, profiles, [0.0] * num_instances, PACE).ends(plan)
    assert found.generation_s == pytest.approx(max(ending.time_s for ending in endings))
    assert found.iteration_s == pytest.approx(trained_s(parts, endings, PACE))


def test_a_group_in_parts_is_trained_when_the_last_one_is_there() -> None:
    profile = InstanceProfile(TokenLatency({1: 1.0}), 8)
    parts = [Part(0, 1, 0, (30.0,)), Part(0, 1, 0, (10.0,)), Part(1, 1, 0, (5.0,))]
    planner = IterationPlanner(parts, [profile] * 2, [0.0, 0.0], TrainerPace(1.0, 1))
    # The other group is trained from 5 to 10, this one when its second part is there.
    assert planner.ends([[0], [1, 2]]) == Ends(30.0, 30.0 + 40.0)


def test_an_instance_with_other_work_begins_later_and_one_with_prompts_too() -> None:
    profile = InstanceProfile(TokenLatency({1: 1.0}), 8, prefill_token_s=0.5)
    planner = IterationPlanner([Part(0, 4, 6, (30.0,))], [profile] * 2, [7.0, 0.0], TrainerPace(0.0, 0))
    # The prompt of a group is computed once.
    assert planner.ends([[0], []]).generation_s == 7.0 + 3.0 + 30.0


def test_a_small_cache_holds_fewer_answers() -> None:
    parts = [Part(group, 1, 0, (10.0,)) for group in range(4)]
    profile = InstanceProfile(TokenLatency({1: 1.0}), 4, kv_cache_tokens=10.0)
    assert IterationPlanner(parts, [profile] * 2, [0.0, 0.0], PACE).ends([[0, 1, 2, 3], []]).generation_s == 20.0


@settings(max_examples=50)
@given(_PARTS, st.integers(2, 4))
def test_a_better_plan_holds_each_part_once_and_costs_no_more(parts: list[Part], num_instances: int) -> None:
    planner = IterationPlanner(parts, [InstanceProfile(PTL, 8)] * num_instances, [0.0] * num_instances, PACE)
    plans = [dealt_in_turn(len(parts), num_instances), [list(range(len(parts)))] + [[]] * (num_instances - 1)]
    found = planner.best_from(plans)
    assert sorted(index for share in found for index in share) == list(range(len(parts)))
    assert all(share == sorted(share) for share in found)
    costs = [ends.iteration_s + 0.3 * ends.generation_s for ends in map(planner.ends, [found, *plans])]
    assert costs[0] <= min(costs[1:]) + 1e-9


def test_both_ends_come_earlier_than_with_the_longest_dealt_in_turn() -> None:
    """Groups of 8, the longest of 120 tokens and the median of 25, as the laptop example has them."""
    lengths = [120, 90, 77, 70, 61, 55, 50, 46, 42, 38, 35, 33, 31, 29, 27, 26, 25, 24, 22, 20, 18, 16, 15, 14, 13, 11]
    parts = [Part(group, 8, 6, (float(length),)) for group, length in enumerate(lengths)]
    profiles = [InstanceProfile(TokenLatency({1: 2.1, 4: 2.6, 16: 3.5, 64: 6.2}), 64)] * 2
    planner = IterationPlanner(parts, profiles, [0.0, 0.0], TrainerPace(0.04, 2048))
    in_turn = dealt_in_turn(len(parts), 2)
    before, after = planner.ends(in_turn), planner.ends(planner.best_from([in_turn]))
    assert after.generation_s < 0.99 * before.generation_s
    assert after.iteration_s < 0.99 * before.iteration_s


def test_of_uncertain_lengths_short_and_long_ones_are_tried() -> None:
    spread = tuple(10.0 + 200.0 * level for level in LEVELS)
    parts = [Part(group, 1, 0, lengths) for group, lengths in enumerate([spread, spread, (100.0,)])]
    profile = InstanceProfile(TokenLatency({1: 1.0}), 1)
    planner = IterationPlanner(parts, [profile] * 2, [0.0, 0.0], TrainerPace(0.0, 0))
    # Each is as long as in the middle of each quarter once: 35, 85, 135 and 185 tokens.
    assert planner.ends([[0, 2], [1]]).generation_s >= 100.0 + (35 + 85 + 135 + 185) / 4
    assert planner.ends([[0], [1, 2]]).generation_s >= 100.0 + (35 + 85 + 135 + 185) / 4
    assert planner.ends([[0, 1, 2], []]).generation_s == 100.0 + 2 * (35 + 85 + 135 + 185) / 4
