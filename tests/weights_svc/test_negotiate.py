"""Which version a receiver takes, in which form, and from where: every case."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import UnavailableError
from streamrl.v1.weights_pb2 import (
    TRANSFER_FORMAT_DELTA,
    TRANSFER_FORMAT_FULL,
    TRANSFER_FORMAT_NCCL,
    TRANSFER_FORMAT_UNSPECIFIED,
    Adapter,
    NegotiateRequest,
    TensorInfo,
    VersionManifest,
)
from weights_svc.negotiate import FabricOffer, Relay, TransferPlan, crosses_anchor, negotiate


def version(digest: str, num_bytes: int = 0, **digests: str) -> VersionManifest:
    """A version with a frozen tensor of 4 bytes and a trained one of all others."""
    tensors = [
        TensorInfo(name=name, dtype="U8", shape=[size], num_bytes=size, digest=digests.get(name, digest))
        for name, size in (("frozen", 4), ("trained", num_bytes - 4))
    ]
    return VersionManifest(digest=digest, num_bytes=num_bytes, tensors=tensors)


VERSIONS = {
    3: version("three", 30, frozen="f"),
    5: version("five", 50, frozen="f"),
    4: version("four", 50, frozen="f"),
}
FULL = [TRANSFER_FORMAT_FULL]
BOTH = [TRANSFER_FORMAT_DELTA, TRANSFER_FORMAT_FULL]
RELAYS = [Relay("east", "east:1"), Relay("west", "west:2"), Relay("west", "west:1")]


def ask(formats=FULL, **wishes) -> NegotiateRequest:
    return NegotiateRequest(formats=formats, **wishes)


def test_a_receiver_with_nothing_takes_the_newest_whole():
    assert negotiate(VERSIONS, ask(BOTH)) == TransferPlan(5, TRANSFER_FORMAT_FULL, 50)


def test_a_receiver_of_whole_tensors_takes_the_newest_whole_whatever_it_holds():
    plan = negotiate(VERSIONS, ask(held_weight_version=4, held_digest="four", min_weight_version=5))
    assert plan == TransferPlan(5, TRANSFER_FORMAT_FULL, 50)


def test_a_receiver_of_differences_takes_the_tensors_that_differ():
    plan = negotiate(VERSIONS, ask(BOTH, held_weight_version=4, held_digest="four"))
    assert plan == TransferPlan(5, TRANSFER_FORMAT_DELTA, 46, base_weight_version=4)


def test_adapters_differ_from_adapters_of_the_same_base_and_from_nothing_else():
    def adapters(digest: str, base_digest: str) -> VersionManifest:
        manifest = version(digest, 20)
        manifest.adapter.MergeFrom(Adapter(base_weight_version=3, base_digest=base_digest))
        return manifest

    versions = {3: VERSIONS[3], 6: adapters("six", "three"), 7: adapters("seven", "three"), 8: adapters("eight", "x")}

    def plan(held: int, wanted: int) -> TransferPlan:
        held_digest = versions[held].digest
        request = ask(BOTH, held_weight_version=held, held_digest=held_digest, exact_weight_version=wanted)
        return negotiate(versions, request)

    assert plan(6, 7) == TransferPlan(7, TRANSFER_FORMAT_DELTA, 20, base_weight_version=6)
    for held, wanted in ((3, 6), (6, 3), (7, 8)):
        assert plan(held, wanted) == TransferPlan(wanted, TRANSFER_FORMAT_FULL, versions[wanted].num_bytes)


def test_tensors_of_another_shape_have_no_base_and_count_whole():
    plan = negotiate(VERSIONS, ask(BOTH, held_weight_version=3, held_digest="three"))
    assert plan == TransferPlan(5, TRANSFER_FORMAT_DELTA, 46, base_weight_version=3)


def test_a_rollback_is_a_difference_too():
    plan = negotiate(VERSIONS, ask(BOTH, held_weight_version=5, held_digest="five", exact_weight_version=4))
    assert plan == TransferPlan(4, TRANSFER_FORMAT_DELTA, 46, base_weight_version=5)


@pytest.mark.parametrize(
    "held, digest", [(4, "four of an earlier attempt"), (4, ""), (2, "two"), (5, "five of an earlier attempt")]
)
def test_a_base_that_is_not_here_just_so_means_the_whole_version(held: int, digest: str):
    plan = negotiate(VERSIONS, ask(BOTH, held_weight_version=held, held_digest=digest))
    assert plan == TransferPlan(5, TRANSFER_FORMAT_FULL, 50)


@pytest.mark.parametrize("anchor_every, is_delta", [(0, True), (1, False), (5, False), (4, True), (10, True)])
def test_an_anchor_goes_whole(anchor_every: int, is_delta: bool):
    plan = negotiate(VERSIONS, ask(BOTH, held_weight_version=4, held_digest="four"), anchor_every=anchor_every)
    assert (plan.format == TRANSFER_FORMAT_DELTA) == is_delta


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 12))
def test_an_anchor_is_crossed_when_a_multiple_lies_behind_one_and_not_the_other(one: int, other: int, every: int):
    low, high = sorted((one, other))
    assert crosses_anchor(one, other, every) == any(v % every == 0 for v in range(low + 1, high + 1))


def test_a_receiver_with_the_newest_takes_nothing():
    for formats in (FULL, BOTH):
        plan = negotiate(VERSIONS, ask(formats, held_weight_version=5, held_digest="five"))
        assert plan == TransferPlan(5, TRANSFER_FORMAT_FULL, 0)


def test_a_receiver_that_is_ahead_after_a_rewind_goes_back_to_the_newest():
    plan = negotiate(VERSIONS, ask(BOTH, held_weight_version=9, held_digest="nine"))
    assert plan == TransferPlan(5, TRANSFER_FORMAT_FULL, 50)


def test_exactly_one_version_may_be_asked_for_whatever_the_least_is():
    assert negotiate(VERSIONS, ask(exact_weight_version=3, min_weight_version=5)).weight_version == 3


def test_exactly_version_0_is_not_the_same_as_no_wish():
    with pytest.raises(LookupError, match="weight version 0 is not here: versions 3, 4, 5 are"):
        negotiate(VERSIONS, ask(exact_weight_version=0))


def test_holding_nothing_is_not_the_same_as_holding_version_0():
    assert negotiate({0: version("", 10)}, ask()).transfer_bytes == 10


def test_before_the_first_announcement_the_receiver_is_told_to_try_again():
    with pytest.raises(UnavailableError, match="no weight version is announced yet"):
        negotiate({}, ask(exact_weight_version=3))


def test_a_least_version_above_the_newest_may_still_come():
    with pytest.raises(UnavailableError, match="the newest weight version is 5: 6 is not announced yet"):
        negotiate(VERSIONS, ask(min_weight_version=6))


@pytest.mark.parametrize("formats", [[], [TRANSFER_FORMAT_UNSPECIFIED], [77], [TRANSFER_FORMAT_DELTA]])
def test_a_receiver_that_does_not_take_whole_tensors_is_refused(formats):
    with pytest.raises(ValueError, match="expected TRANSFER_FORMAT_FULL"):
        negotiate(VERSIONS, ask(formats))


def test_forms_of_newer_receivers_do_no_harm():
    assert negotiate(VERSIONS, ask([77, TRANSFER_FORMAT_FULL])).format == TRANSFER_FORMAT_FULL


def test_a_receiver_is_sent_to_the_relay_of_its_site():
    assert negotiate(VERSIONS, ask(site="west"), relays=RELAYS).source_address == "west:1"
    assert negotiate(VERSIONS, ask(site="north"), relays=RELAYS).source_address == ""
    assert negotiate(VERSIONS, ask(), relays=RELAYS).source_address == ""


def test_a_receiver_is_not_sent_again_to_where_nobody_answered():
    west = ask(site="west", unreachable_addresses=["west:1"])
    assert negotiate(VERSIONS, west, relays=RELAYS).source_address == "west:2"
    west.unreachable_addresses.append("west:2")
    assert negotiate(VERSIONS, west, relays=RELAYS).source_address == ""


def test_relays_of_one_site_are_not_sent_to_each_other():
    request = ask(site="west", serving_address="west:2")
    assert negotiate(VERSIONS, request, relays=RELAYS).source_address == ""


weight_versions = st.integers(0, 6)
digests = st.sampled_from(["", "a", "b"])


@given(
    st.dictionaries(weight_versions, st.builds(version, digests, st.integers(4, 100))),
    st.none() | weight_versions,
    digests,
    weight_versions,
    st.none() | weight_versions,
    st.sampled_from([FULL, BOTH]),
    st.integers(0, 4),
)
def test_a_plan_is_what_was_asked_for_or_a_refusal_says_why(versions, held, digest, least, exact, formats, anchors):
    request = ask(
        formats,
        min_weight_version=least,
        exact_weight_version=exact,
        held_weight_version=held,
        held_digest=digest,
    )
    try:
        plan = negotiate(versions, request, anchor_every=anchors)
    except LookupError:
        assert exact is not None and exact not in versions and versions
        return
    except UnavailableError:
        assert not versions or (exact is None and max(versions) < least)
        return
    assert plan.weight_version == (max(versions) if exact is None else exact)
    assert exact is not None or plan.weight_version >= least
    offered = versions[plan.weight_version]
    same = (held, digest) == (plan.weight_version, offered.digest)
    assert plan.transfer_bytes <= offered.num_bytes
    assert not same or plan.transfer_bytes == 0
    assert plan.format in formats
    if plan.format == TRANSFER_FORMAT_DELTA:
        assert plan.base_weight_version == held and versions[held].digest == digest
    else:
        assert plan.transfer_bytes == (0 if same else offered.num_bytes)


OFFER = FabricOffer("ib0", "west", frozenset({4, 5}))
ON_FABRIC = {"fabric": "ib0", "site": "west", "exact_weight_version": 5}
ALL = [*BOTH, TRANSFER_FORMAT_NCCL]


def test_a_receiver_on_the_fabric_is_sent_the_version_there():
    assert negotiate(VERSIONS, ask(ALL, **ON_FABRIC), fabric=OFFER) == TransferPlan(5, TRANSFER_FORMAT_NCCL, 50)


def test_the_fabric_comes_before_a_difference_and_before_a_relay():
    request = ask(ALL, **ON_FABRIC, held_weight_version=4, held_digest="four")
    assert negotiate(VERSIONS, request, fabric=OFFER, relays=RELAYS) == TransferPlan(5, TRANSFER_FORMAT_NCCL, 50)


def test_what_a_receiver_on_the_fabric_holds_already_is_not_sent_again():
    request = ask(ALL, **ON_FABRIC, held_weight_version=5, held_digest="five")
    assert negotiate(VERSIONS, request, fabric=OFFER) == TransferPlan(5, TRANSFER_FORMAT_FULL, 0)


@pytest.mark.parametrize(
    "differs",
    [
        {"formats": BOTH},
        {"fabric": "ib1"},
        {"fabric": ""},
        {"site": "east"},
        {"site": ""},
        {"exact_weight_version": 3},
        {"exact_weight_version": None},
        {"serving_address": "west:9"},
    ],
)
def test_where_anything_does_not_fit_the_plan_is_the_one_without_a_fabric(differs: dict):
    request = ask(**({"formats": ALL} | ON_FABRIC | differs))
    plan = negotiate(VERSIONS, request, fabric=OFFER)
    assert plan == negotiate(VERSIONS, request)
    assert plan.format == TRANSFER_FORMAT_FULL


def test_a_service_without_a_fabric_or_whose_own_has_no_name_sends_nothing_there():
    request = ask(ALL, **ON_FABRIC)
    assert negotiate(VERSIONS, request).format == TRANSFER_FORMAT_FULL
    nameless = FabricOffer("", "west", frozenset({5}))
    for name in ("", "ib0"):
        request = ask(ALL, **(ON_FABRIC | {"fabric": name}))
        assert negotiate(VERSIONS, request, fabric=nameless).format == TRANSFER_FORMAT_FULL
