"""Plans: complete, in order, balanced."""

import math
import random
from collections import Counter
from dataclasses import replace
from statistics import NormalDist
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.planning.dispatch import PIECES_PER_INSTANCE, POLICIES, InstanceLoad, Piece, cut, plan
from streamrl.planning.forecast import LEVELS
from streamrl.planning.iteration import TrainerPace
from streamrl.planning.profile import InstanceProfile, TokenLatency
from streamrl.planning.simulated_fleet import makespan_s
from streamrl.planning.simulated_instance import SimulatedSequence
from streamrl.planning.skewness import Objective, plan_by_skewness

_PIECES = st.lists(st.tuples(st.integers(1, 16), st.integers(1, 2000)), max_size=60).map(
    lambda sizes: [Piece(group, tuple(range(count)), tokens) for group, (count, tokens) in enumerate(sizes)]
)

_INSTANCES = st.lists(st.tuples(st.integers(1, 256), st.integers(0, 10_000)), min_size=1, max_size=9).map(
    lambda sizes: [InstanceLoad(f"generator-{i}", running, tokens) for i, (running, tokens) in enumerate(sizes)]
)


def _samples(pieces: list[Piece]) -> Counter[tuple[int, int]]:
    return Counter((piece.group, sample) for piece in pieces for sample in piece.samples)


@given(st.sampled_from(sorted(POLICIES)), _PIECES, _INSTANCES, st.integers(0, 2**63 - 1))
def test_a_plan_holds_every_sample_exactly_once(
    policy: str, pieces: list[Piece], instances: list[InstanceLoad], seed: int
) -> None:
    shares = plan(policy, pieces, instances, seed=seed)
    assert _samples([piece for share in shares.values() for piece in share]) == _samples(pieces)
    assert set(shares) <= {instance.name for instance in instances}
    assert all(shares.values())


@given(st.sampled_from(sorted(POLICIES)), _PIECES, _INSTANCES, st.integers(0, 2**63 - 1))
def test_the_same_arguments_give_the_same_plan_in_whatever_order_instances_are_named(
    policy: str, pieces: list[Piece], instances: list[InstanceLoad], seed: int
) -> None:
    assert plan(policy, pieces, instances, seed=seed) == plan(policy, pieces, instances[::-1], seed=seed)


@given(st.sampled_from(["longest_first", "makespan", "round_robin"]), _PIECES, _INSTANCES)
def test_an_instance_starts_with_its_longest(policy: str, pieces: list[Piece], instances: list[InstanceLoad]) -> None:
    for share in plan(policy, pieces, instances).values():
        lengths = [piece.expected_tokens for piece in share]
        assert lengths == sorted(lengths, reverse=True)


@given(_PIECES, st.integers(1, 9))
def test_longest_first_leaves_equal_instances_at_most_one_piece_apart(pieces: list[Piece], num_instances: int) -> None:
    instances = [InstanceLoad(f"generator-{i}", 64) for i in range(num_instances)]
    shares = plan("longest_first", pieces, instances)
    loads = [sum(piece.work_tokens for piece in shares.get(instance.name, [])) for instance in instances]
    largest = max((piece.work_tokens for share in shares.values() for piece in share), default=0)
    assert max(loads) - min(loads) <= largest


@given(_PIECES, st.integers(1, 9))
def test_round_robin_deals_equal_instances_the_same_number_of_pieces(pieces: list[Piece], num_instances: int) -> None:
    instances = [InstanceLoad(f"generator-{i}", 64) for i in range(num_instances)]
    shares = plan("round_robin", pieces, instances)
    counts = [len(shares.get(instance.name, [])) for instance in instances]
    assert max(counts) - min(counts) <= 1


def test_longest_first_gives_an_instance_work_in_proportion_to_its_size() -> None:
    pieces = [Piece(group, (0,), 100) for group in range(400)]
    shares = plan("longest_first", pieces, [InstanceLoad("large", 96), InstanceLoad("small", 32)])
    assert (len(shares["large"]), len(shares["small"])) == (300, 100)


def test_longest_first_does_not_give_the_longest_to_a_small_instance_that_is_idle() -> None:
    pieces = [Piece(0, (0,), 1000)]
    shares = plan(
        "longest_first", pieces, [InstanceLoad("large", 64, outstanding_tokens=640), InstanceLoad("small", 1)]
    )
    assert list(shares) == ["large"]


@pytest.mark.parametrize("policy", ["longest_first", "makespan", "round_robin"])
def test_new_work_goes_first_to_the_instance_that_has_least(policy: str) -> None:
    shares = plan(policy, [Piece(0, (0,), 10)], [InstanceLoad("a", 8, outstanding_tokens=90), InstanceLoad("b", 8, 0)])
    assert list(shares) == ["b"]


def test_random_draws_differently_with_another_seed() -> None:
    pieces = [Piece(group, (0,), 100) for group in range(64)]
    instances = [InstanceLoad("a", 8), InstanceLoad("b", 8)]
    assert plan("random", pieces, instances, seed=1) != plan("random", pieces, instances, seed=2)


def test_random_keeps_the_order_of_the_batch() -> None:
    pieces = [Piece(group, (0,), group + 1) for group in range(64)]
    for share in plan("random", pieces, [InstanceLoad("a", 8), InstanceLoad("b", 8)], seed=3).values():
        assert [piece.group for piece in share] == sorted(piece.group for piece in share)


@given(_PIECES, st.integers(1, 9))
def test_groups_stay_whole_when_there_are_enough_of_them(pieces: list[Piece], num_instances: int) -> None:
    parts = cut(pieces, num_instances)
    assert _samples(parts) == _samples(pieces)
    if len(pieces) >= PIECES_PER_INSTANCE * num_instances or num_instances == 1:
        assert parts == pieces


def test_one_group_is_spread_evenly_over_the_fleet() -> None:
    shares = plan("longest_first", [Piece(0, tuple(range(8)), 50)], [InstanceLoad("a", 8), InstanceLoad("b", 8)])
    assert {name: [piece.samples for piece in share] for name, share in shares.items()} == {
        "a": [(0, 1, 2, 3)],
        "b": [(4, 5, 6, 7)],
    }


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'fifo' is unknown: expected one of longest_first, makespan, paper"):
        plan("fifo", [], [InstanceLoad("a", 1)])


def test_a_plan_needs_an_instance() -> None:
    with pytest.raises(ValueError, match="at least one instance"):
        plan("longest_first", [], [])


_PTL = TokenLatency({1: 1.0, 2: 1.1, 4: 1.3, 8: 2.0})


def _load(name: str, latency: TokenLatency = _PTL, **other: Any) -> InstanceLoad:
    return InstanceLoad(name, 8, profile=InstanceProfile(latency, 8, **other))


def test_makespan_gives_the_longest_answer_an_instance_of_its_own() -> None:
    pieces = [Piece(0, (0,), 10_000)] + [Piece(group, (0,), 200) for group in range(1, 15)]
    one = _load("a")
    shares = plan("makespan", pieces, [one, replace(one, name="b"), replace(one, name="c")])
    assert [0] in [[piece.group for piece in share] for share in shares.values()]


def test_makespan_gives_the_longest_answer_to_the_fastest_instance() -> None:
    pieces = [Piece(0, (0,), 10_000)] + [Piece(group, (0,), 200) for group in range(1, 15)]
    slow = TokenLatency({1: 1.5, 8: 3.0})
    shares = plan("makespan", pieces, [_load("a", slow), _load("b"), _load("c", slow)])
    assert shares["b"][0].group == 0


def test_makespan_keeps_groups_whole_where_cutting_them_spares_nothing() -> None:
    pieces = [Piece(group, tuple(range(8)), 100) for group in range(4)]
    one = _load("a")
    shares = plan("makespan", pieces, [one, replace(one, name="b")])
    assert all(len(piece.samples) == 8 for share in shares.values() for piece in share)


def test_makespan_cuts_a_group_that_would_keep_others_idle() -> None:
    one = _load("a")
    shares = plan("makespan", [Piece(0, tuple(range(8)), 100)], [one, replace(one, name="b")])
    assert sorted(len(piece.samples) for share in shares.values() for piece in share) == [4, 4]


def test_makespan_cuts_no_group_whose_prompt_costs_more_to_compute_again() -> None:
    one = _load("a", prefill_token_s=1.0)
    piece = Piece(0, tuple(range(8)), 100, prompt_tokens=10_000)
    assert sum(map(len, plan("makespan", [piece], [one, replace(one, name="b")]).values())) == 1


def test_a_hundred_thousand_prompts_are_planned_over_a_thousand_instances() -> None:
    generator = random.Random(1)
    pieces = []
    for group in range(100_000):
        mean = generator.lognormvariate(8, 1)
        pieces.append(Piece(group, (0,), round(mean), tuple(mean * (0.5 + level) for level in LEVELS)))
    one = _load("0")
    shares = plan("makespan", pieces, [replace(one, name=str(name)) for name in range(1000)])
    assert sorted(piece.group for share in shares.values() for piece in share) == list(range(100_000))


def test_the_papers_policies_are_algorithm_2() -> None:
    lengths = [5, 50, 7, 9, 40, 3, 8, 6, 30, 4]
    instances = [_load(name) for name in "abc"]
    for policy, objective in (("paper", "sum"), ("paper_max", "max")):
        shares = plan(
            policy,
            [Piece(group, (0,), tokens) for group, tokens in enumerate(lengths)],
            instances,
            length_p50=6,
            length_p90=45,
        )
        found = plan_by_skewness(
            lengths,
            3,
            token_latency=_PTL,
            max_batch=8,
            length_p50=6,
            length_p90=45,
            objective=cast(Objective, objective),
        )
        assert [[piece.group for piece in shares[name]] for name in "abc"] == found.instances


_LAPTOP = InstanceProfile(TokenLatency({1: 0.0021, 4: 0.0026, 16: 0.0035, 64: 0.0062}), 64)
_GROUPS = [Piece(group, tuple(range(8)), tokens) for group, tokens in enumerate([120, 80, 60, *range(50, 8, -2)])]


def test_a_trainer_that_is_waited_for_changes_the_plan_of_measured_instances_alone() -> None:
    pace = TrainerPace(4e-5, 2048)
    measured = [InstanceLoad(name, 64, profile=_LAPTOP) for name in "ab"]
    guessed = [InstanceLoad(name, 64) for name in "ab"]
    assert plan("makespan", _GROUPS, measured, trainer_pace=pace) != plan("makespan", _GROUPS, measured)
    assert plan("makespan", _GROUPS, guessed, trainer_pace=pace) == plan("makespan", _GROUPS, guessed)


def test_groups_that_err_together_are_no_reason_to_end_later_than_dealt_in_turn() -> None:
    """Forecasts say what one answer may be; all of a group are long, or none is."""
    generator = random.Random(7)
    ours_s, in_turn_s = 0.0, 0.0
    for _ in range(20):
        foretold = [max(4.0, generator.lognormvariate(3.4, 0.8)) for _ in range(32)]
        came = [max(1, round(length * generator.lognormvariate(0.0, 0.15))) for length in foretold]
        spread = [
            math.exp(0.15 * max(-2.5, min(2.5, NormalDist().inv_cdf(min(max(p, 1e-6), 1 - 1e-6))))) for p in LEVELS
        ]
        pieces = [
            Piece(group, tuple(range(8)), round(length), tuple(max(1.0, length * factor) for factor in spread), 6)
            for group, length in enumerate(foretold)
        ]
        instances = [InstanceLoad(name, 64, profile=_LAPTOP) for name in "ab"]
        for policy in ("makespan", "round_robin"):
            shares = plan(policy, pieces, instances)
            played = [
                [
                    SimulatedSequence((piece.group, sample), came[piece.group], rank)
                    for rank, piece in enumerate(shares.get(instance.name, []))
                    for sample in piece.samples
                ]
                for instance in instances
            ]
            ended_s = makespan_s(played, [_LAPTOP, _LAPTOP])
            ours_s, in_turn_s = (ours_s + ended_s, in_turn_s) if policy == "makespan" else (ours_s, in_turn_s + ended_s)
    assert ours_s < 1.01 * in_turn_s
