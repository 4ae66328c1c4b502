import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.staleness import required_version, staleness

batches = st.integers(0, 1000)
bounds = st.integers(0, 8)


@given(batches, bounds)
def test_a_sample_of_the_required_version_is_within_the_bound(batch: int, max_staleness: int) -> None:
    assert 0 <= staleness(batch, [required_version(batch, max_staleness)]) <= max_staleness


@given(st.integers(1, 1000), bounds)
def test_the_version_before_the_required_one_is_out_of_bound(batch: int, max_staleness: int) -> None:
    required = required_version(batch, max_staleness)
    if required > 0:
        assert staleness(batch, [required - 1]) > max_staleness


def test_synchronous_training_needs_the_version_of_the_batch() -> None:
    assert [required_version(batch, 0) for batch in range(4)] == [0, 1, 2, 3]


def test_the_paper_generates_batches_zero_and_one_with_the_initial_weights() -> None:
    assert [required_version(batch, 1) for batch in range(5)] == [0, 0, 1, 2, 3]


def test_staleness_counts_from_the_oldest_token() -> None:
    assert staleness(7, [6, 5, 7]) == 2


@pytest.mark.parametrize("versions", [[8], [7, 8]])
def test_a_token_from_the_future_is_an_error(versions: list[int]) -> None:
    with pytest.raises(ValueError, match="weight version 8"):
        staleness(7, versions)


def test_no_version_at_all_is_an_error() -> None:
    with pytest.raises(ValueError, match="got none"):
        staleness(7, [])
