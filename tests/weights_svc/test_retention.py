"""Which versions may go."""

from hypothesis import given
from hypothesis import strategies as st

from weights_svc.retention import retired

versions = st.sets(st.integers(0, 30))


def test_all_but_the_newest_go_oldest_first():
    assert retired([7, 3, 5, 4, 6], keep_versions=2, in_use=[]) == [3, 4, 5]


def test_a_version_in_use_stays():
    assert retired([3, 4, 5, 6], keep_versions=2, in_use=[3]) == [4]


def test_a_base_stays():
    assert retired([0, 3, 4, 5, 6], keep_versions=2, in_use=[], bases=[0]) == [3, 4]


@given(versions, st.integers(1, 5), versions, versions)
def test_what_stays_is_the_newest_and_what_is_needed(held, keep_versions, in_use, bases):
    stay = held - set(retired(held, keep_versions, in_use, bases))
    assert stay == set(sorted(held)[-keep_versions:]) | (held & (in_use | bases))
