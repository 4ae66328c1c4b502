from hypothesis import given
from hypothesis import strategies as st

from streamrl.identity import PURPOSE_EVALUATION, PURPOSE_TRAIN, SampleKey, group_key, sample_seed

keys = st.builds(
    SampleKey,
    purpose=st.sampled_from([PURPOSE_TRAIN, PURPOSE_EVALUATION]),
    batch=st.integers(0, 2**40),
    group=st.integers(0, 2**31 - 1),
    sample=st.integers(0, 2**31 - 1),
)


@given(keys)
def test_an_identity_survives_the_wire(key: SampleKey) -> None:
    assert SampleKey.from_proto(key.to_proto()) == key


@given(st.integers(0, 2**32), st.lists(keys, min_size=2, max_size=20, unique=True))
def test_each_sample_has_its_own_seed_that_fits_a_signed_number(run_seed: int, some: list[SampleKey]) -> None:
    seeds = [sample_seed(run_seed, key) for key in some]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_seed_depends_on_run_identity_and_prefix_alone() -> None:
    key = SampleKey(PURPOSE_TRAIN, 3, 1, 2)
    assert sample_seed(5, key) == sample_seed(5, key)
    assert len({sample_seed(5, key), sample_seed(6, key), sample_seed(5, key, 17)}) == 3


def test_samples_of_a_group_share_their_kafka_key() -> None:
    assert group_key(SampleKey(PURPOSE_TRAIN, 3, 1, 0)) == group_key(SampleKey(PURPOSE_TRAIN, 3, 1, 7))
    assert group_key(SampleKey(PURPOSE_TRAIN, 3, 1, 0)) != group_key(SampleKey(PURPOSE_EVALUATION, 3, 1, 0))
