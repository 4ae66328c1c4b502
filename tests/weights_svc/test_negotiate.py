"""Which version a receiver takes: every case."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import UnavailableError
from streamrl.v1.weights_pb2 import TRANSFER_FORMAT_FULL, TRANSFER_FORMAT_UNSPECIFIED
from weights_svc.negotiate import HeldVersion, TransferPlan, negotiate

VERSIONS = {3: HeldVersion("three", 30), 5: HeldVersion("five", 50), 4: HeldVersion("four", 40)}
FULL = [TRANSFER_FORMAT_FULL]


def test_a_receiver_with_nothing_takes_the_newest_whole():
    assert negotiate(VERSIONS, formats=FULL) == TransferPlan(5, TRANSFER_FORMAT_FULL, 50)


def test_a_receiver_with_an_older_version_takes_the_newest_whole():
    plan = negotiate(VERSIONS, formats=FULL, held_weight_version=4, held_digest="four", min_weight_version=5)
    assert plan == TransferPlan(5, TRANSFER_FORMAT_FULL, 50)


def test_a_receiver_with_the_newest_takes_nothing():
    plan = negotiate(VERSIONS, formats=FULL, held_weight_version=5, held_digest="five")
    assert plan == TransferPlan(5, TRANSFER_FORMAT_FULL, 0)


def test_the_same_number_with_another_digest_is_another_version():
    plan = negotiate(VERSIONS, formats=FULL, held_weight_version=5, held_digest="five of an earlier attempt")
    assert plan.transfer_bytes == 50


def test_a_receiver_that_is_ahead_after_a_rewind_goes_back_to_the_newest():
    plan = negotiate(VERSIONS, formats=FULL, held_weight_version=9, held_digest="nine")
    assert plan == TransferPlan(5, TRANSFER_FORMAT_FULL, 50)


def test_exactly_one_version_may_be_asked_for_whatever_the_least_is():
    assert negotiate(VERSIONS, formats=FULL, exact_weight_version=3, min_weight_version=5).weight_version == 3


def test_exactly_version_0_is_not_the_same_as_no_wish():
    with pytest.raises(LookupError, match="weight version 0 is not here: versions 3, 4, 5 are"):
        negotiate(VERSIONS, formats=FULL, exact_weight_version=0)


def test_holding_nothing_is_not_the_same_as_holding_version_0():
    versions = {0: HeldVersion("", 10)}
    assert negotiate(versions, formats=FULL).transfer_bytes == 10


def test_before_the_first_announcement_the_receiver_is_told_to_try_again():
    with pytest.raises(UnavailableError, match="no weight version is announced yet"):
        negotiate({}, formats=FULL, exact_weight_version=3)


def test_a_least_version_above_the_newest_may_still_come():
    with pytest.raises(UnavailableError, match="the newest weight version is 5: 6 is not announced yet"):
        negotiate(VERSIONS, formats=FULL, min_weight_version=6)


@pytest.mark.parametrize("formats", [[], [TRANSFER_FORMAT_UNSPECIFIED], [77]])
def test_a_receiver_that_understands_no_form_is_refused(formats):
    with pytest.raises(ValueError, match="none of the forms"):
        negotiate(VERSIONS, formats=formats)


def test_forms_of_newer_receivers_do_no_harm():
    assert negotiate(VERSIONS, formats=[77, TRANSFER_FORMAT_FULL]).format == TRANSFER_FORMAT_FULL


weight_versions = st.integers(0, 6)
digests = st.sampled_from(["", "a", "b"])


@given(
    st.dictionaries(weight_versions, st.builds(HeldVersion, digests, st.integers(1, 100))),
    st.none() | weight_versions,
    digests,
    weight_versions,
    st.none() | weight_versions,
)
def test_a_plan_is_what_was_asked_for_or_a_refusal_says_why(versions, held, held_digest, least, exact):
    try:
        plan = negotiate(
            versions,
            formats=FULL,
            min_weight_version=least,
            exact_weight_version=exact,
            held_weight_version=held,
            held_digest=held_digest,
        )
    except LookupError:
        assert exact is not None and exact not in versions and versions
        return
    except UnavailableError:
        assert not versions or (exact is None and max(versions) < least)
        return
    assert plan.weight_version == (max(versions) if exact is None else exact)
    assert exact is not None or plan.weight_version >= least
    offered = versions[plan.weight_version]
    same = (held, held_digest) == (plan.weight_version, offered.digest)
    assert plan.transfer_bytes == (0 if same else offered.num_bytes)
