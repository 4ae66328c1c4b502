"""Which version a batch needs, and what comes first."""

from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.admission import batch_order, priority, version_for
from streamrl.identity import PURPOSE_EVALUATION, PURPOSE_TRAIN, BatchKey

_KEYS = st.tuples(st.sampled_from([PURPOSE_TRAIN, PURPOSE_EVALUATION]), st.integers(0, 100_000)).map(
    lambda key: BatchKey(*key)
)


@given(st.integers(0, 100_000), st.integers(0, 20))
def test_a_training_batch_needs_a_version_within_the_bound(batch: int, max_staleness: int) -> None:
    version = version_for(BatchKey(PURPOSE_TRAIN, batch), max_staleness)
    assert 0 <= batch - version <= max_staleness


@given(st.integers(0, 100_000), st.integers(0, 20))
def test_an_evaluation_needs_its_own_version(version: int, max_staleness: int) -> None:
    assert version_for(BatchKey(PURPOSE_EVALUATION, version), max_staleness) == version


@given(_KEYS, _KEYS, st.integers(0, 20), st.integers(1, 100_000), st.integers(1, 100_000))
def test_priority_orders_batches_first_and_then_the_longest(
    one: BatchKey, other: BatchKey, max_staleness: int, one_tokens: int, other_tokens: int
) -> None:
    one_priority, other_priority = (
        priority(key, max_staleness, tokens) for key, tokens in ((one, one_tokens), (other, other_tokens))
    )
    expected = (batch_order(one, max_staleness), -one_tokens) < (batch_order(other, max_staleness), -other_tokens)
    assert (one_priority < other_priority) == expected


def test_an_evaluation_comes_before_training_that_needs_the_same_version() -> None:
    evaluation, training = BatchKey(PURPOSE_EVALUATION, 3), BatchKey(PURPOSE_TRAIN, 4)
    assert priority(evaluation, 1, 10) < priority(training, 1, 10_000)


@given(_KEYS, st.integers(0, 2**40), st.integers(0, 2**40), st.integers(2**24, 2**40))
def test_priority_fits_a_signed_64_bit_number(key: BatchKey, max_staleness: int, tokens: int, batch: int) -> None:
    for one in (key, BatchKey(key.purpose, batch)):
        assert 0 <= priority(one, max_staleness, tokens) < 2**63
