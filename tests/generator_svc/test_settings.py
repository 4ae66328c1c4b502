import pytest

from generator_svc.settings import GeneratorSettings, cores_of_workers, instance_index


def test_two_instances_on_two_cores_get_one_each() -> None:
    assert [cores_of_workers(index, 1, 1, [0, 1]) for index in (0, 1)] == [[[0]], [[1]]]


def test_workers_and_instances_get_cores_of_their_own_while_there_are_enough() -> None:
    cores = [core for index in (0, 1) for worker in cores_of_workers(index, 2, 2, range(10, 18)) for core in worker]
    assert sorted(cores) == list(range(10, 18))


def test_a_third_instance_shares_the_first_ones_core() -> None:
    assert cores_of_workers(2, 1, 1, [0, 1]) == [[0]]


def test_all_cores_means_all() -> None:
    assert cores_of_workers(1, 1, 0, [4, 5, 6]) == [[4, 5, 6]]


@pytest.mark.parametrize(("instance", "index"), [("generator-0", 0), ("generator-12", 12), ("generator_svc", 0)])
def test_an_instances_number_ends_its_name(instance: str, index: int) -> None:
    assert instance_index(instance) == index


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="max_runing"):
        GeneratorSettings.model_validate({"generator": {"max_runing": 1}})


def test_top_p_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"generator\.top_p"):
        GeneratorSettings.model_validate({"generator": {"top_p": 0.9}})


def test_the_canary_limit_follows_the_dtype_unless_it_is_set() -> None:
    assert GeneratorSettings.model_validate({"model": {"dtype": "float32"}}).canary_alarm_nats == 0.001
    assert GeneratorSettings.model_validate({"model": {"dtype": "bfloat16"}}).canary_alarm_nats == 0.05
    assert GeneratorSettings.model_validate({"generator": {"canary_alarm_nats": 0.2}}).canary_alarm_nats == 0.2


def test_more_sequences_than_any_engine_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="less than or equal to 65536"):
        GeneratorSettings.model_validate({"generator": {"max_running": 2**31 - 1}})
