"""Who meets whom, whoever comes, is late, dies or comes back."""

from hypothesis import given
from hypothesis import strategies as st

from weights_svc.rendezvous import Membership, Rendezvous


def version(number: int) -> tuple[int, str]:
    return number, f"digest-{number}"


def come(rendezvous: Rendezvous, receiver: str, number: int) -> bool:
    """As one that is in the group if it is one of its members."""
    in_group = rendezvous.group is not None and receiver in rendezvous.group.members
    return rendezvous.come(receiver, version(number), in_group=in_group)


def gather(rendezvous: Rendezvous, number: int, *receivers: str) -> Membership | None:
    """These come for a version, and the gathering is closed."""
    for receiver in receivers:
        assert come(rendezvous, receiver, number)
    return rendezvous.close()


def gather_and_move(rendezvous: Rendezvous, number: int, *receivers: str) -> Membership | None:
    membership = gather(rendezvous, number, *receivers)
    if membership is not None:
        rendezvous.moved(membership)
    return membership


def test_the_first_who_come_are_a_group_and_stay_one():
    rendezvous = Rendezvous()
    first = gather_and_move(rendezvous, 1, "b", "a")
    assert first == Membership(("a", "b"))
    assert gather_and_move(rendezvous, 2, "a", "b") == rendezvous.group == first


def test_nobody_waits_once_all_who_are_known_have_come():
    rendezvous = Rendezvous()
    gather_and_move(rendezvous, 1, "a", "b")
    come(rendezvous, "a", 2)
    assert not rendezvous.complete
    come(rendezvous, "b", 2)
    assert rendezvous.complete


def test_a_newcomer_is_waited_for_since_others_may_follow():
    rendezvous = Rendezvous()
    come(rendezvous, "a", 1)
    assert rendezvous.gathering
    assert not rendezvous.complete


def test_a_newcomer_makes_a_new_group():
    rendezvous = Rendezvous()
    gather_and_move(rendezvous, 1, "a", "c")
    grown = gather_and_move(rendezvous, 2, "a", "b", "c")
    assert grown == Membership(("a", "b", "c"))
    assert [grown.rank(name) for name in "abc"] == [1, 2, 3]


def test_a_late_one_takes_the_ordinary_way_and_is_of_the_next_group():
    rendezvous = Rendezvous()
    gather_and_move(rendezvous, 1, "a", "b")
    assert not come(rendezvous, "late", 1)
    assert gather_and_move(rendezvous, 2, "a", "b", "late") is not None


def test_a_dead_member_costs_two_versions_and_the_others_then_are_a_group():
    rendezvous = Rendezvous()
    gather_and_move(rendezvous, 1, "a", "b", "dead")
    assert gather_and_move(rendezvous, 2, "a", "b") is None
    assert gather_and_move(rendezvous, 3, "a", "b") is None
    assert gather_and_move(rendezvous, 4, "a", "b") == Membership(("a", "b"))


def test_one_miss_costs_one_version_and_not_the_group():
    rendezvous = Rendezvous()
    group = gather_and_move(rendezvous, 1, "a", "b")
    assert gather_and_move(rendezvous, 2, "a") is None
    assert rendezvous.group == group
    assert gather_and_move(rendezvous, 3, "a", "b") == group


def test_while_one_version_is_gathered_for_or_moved_another_takes_the_ordinary_way():
    rendezvous = Rendezvous()
    assert come(rendezvous, "a", 2)
    assert not come(rendezvous, "b", 1)
    membership = rendezvous.close()
    assert membership is None, "b is known and has not come"
    membership = gather(rendezvous, 3, "a", "b")
    assert membership is not None
    assert not come(rendezvous, "a", 4)
    rendezvous.moved(membership)
    assert come(rendezvous, "a", 4)


def test_a_member_that_was_started_anew_makes_the_same_members_meet_anew():
    rendezvous = Rendezvous()
    group = gather_and_move(rendezvous, 1, "a", "b")
    come(rendezvous, "a", 2)
    rendezvous.come("b", version(2), in_group=False)
    assert rendezvous.complete
    assert rendezvous.close() == group
    assert rendezvous.group is None


def test_a_group_that_failed_is_no_group_and_failures_are_counted_in_a_row():
    rendezvous = Rendezvous()
    gather_and_move(rendezvous, 1, "a")
    for number in (2, 3):
        assert gather(rendezvous, number, "a") is not None
        rendezvous.failed()
        assert rendezvous.group is None
    assert rendezvous.num_failures == 2
    gather_and_move(rendezvous, 4, "a")
    assert rendezvous.num_failures == 0


def test_who_has_gone_while_it_waited_is_missing():
    rendezvous = Rendezvous()
    come(rendezvous, "a", 1)
    come(rendezvous, "b", 1)
    rendezvous.withdraw("b")
    assert rendezvous.close() is None
    come(rendezvous, "a", 2)
    rendezvous.withdraw("a")
    assert rendezvous.close() is None, "nobody is left"


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.sampled_from("abcde"), st.integers(0, 6)),
        st.tuples(st.just("withdraw"), st.sampled_from("abcde"), st.just(0)),
        st.tuples(st.sampled_from(["close", "moved", "failed"]), st.just(""), st.just(0)),
    ),
    max_size=60,
)


@given(EVENTS)
def test_whatever_happens_all_who_came_are_told_the_same_and_ranks_are_complete(
    events: list[tuple[str, str, int]],
):
    rendezvous, promised, closed = Rendezvous(), set(), []
    membership = None
    for what, receiver, number in events:
        if what == "come":
            if come(rendezvous, receiver, number):
                assert not rendezvous.moving
                promised.add(receiver)
                if not closed or closed[-1] != number:
                    closed.append(number)
        elif what == "withdraw":
            rendezvous.withdraw(receiver)
            promised.discard(receiver)
        elif what == "close" and rendezvous.gathering:
            membership = rendezvous.close()
            assert rendezvous.moving == (membership is not None)
            if membership is not None:
                assert set(membership.members) == promised
                ranks = [membership.rank(name) for name in membership.members]
                assert [0, *ranks] == list(range(membership.world_size))
            promised.clear()
        elif what == "moved" and rendezvous.moving:
            assert membership is not None
            rendezvous.moved(membership)
            assert rendezvous.group == membership
        elif what == "failed" and rendezvous.moving:
            rendezvous.failed()
            assert rendezvous.group is None
    assert len(closed) == len(set(closed)), "a version is gathered for once"


@given(st.sets(st.sampled_from("abcdef"), min_size=1), st.lists(st.sampled_from("abcdef")))
def test_after_any_past_the_same_receivers_are_a_group_within_three_versions(alive: set[str], past: list[str]):
    rendezvous = Rendezvous()
    for number, receiver in enumerate(past):
        if come(rendezvous, receiver, number):
            membership = rendezvous.close()
            if membership is not None:
                rendezvous.failed()
    groups = [gather_and_move(rendezvous, 1000 + number, *alive) for number in range(3)]
    assert groups[-1] == Membership(tuple(sorted(alive)))
