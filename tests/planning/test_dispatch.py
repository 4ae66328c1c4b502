"""Plans: complete, in order, balanced."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.planning.dispatch import PIECES_PER_INSTANCE, POLICIES, InstanceLoad, Piece, cut, plan

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


@given(st.sampled_from(sorted(name for name, policy in POLICIES.items() if policy.longest_first)), _PIECES, _INSTANCES)
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


@pytest.mark.parametrize("policy", ["longest_first", "round_robin"])
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
    with pytest.raises(ValueError, match="'fifo' is unknown: expected one of longest_first, random, round_robin"):
        plan("fifo", [], [InstanceLoad("a", 1)])


def test_a_plan_needs_an_instance() -> None:
    with pytest.raises(ValueError, match="at least one instance"):
        plan("longest_first", [], [])
