import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.planning.profile import TokenLatency
from streamrl.planning.skewness import Objective, instance_latency_s, plan_by_skewness

PTL = TokenLatency(
    {
        size: latency_ms / 1000
        for size, latency_ms in {
            1: 8.35, 2: 8.75, 4: 9.0, 8: 9.05, 16: 9.45, 32: 10.25, 64: 11.65, 128: 15.25, 256: 21.2, 512: 36.9,
        }.items()
    }
)  # fmt: skip
"""The paper's Fig 6: 7B on an H800."""


@pytest.mark.parametrize(
    ("num_instances", "objective", "num_long_tail"), [(32, "sum", 17), (32, "max", 26), (16, "sum", 9), (16, "max", 11)]
)
def test_the_papers_lengths_are_split_as_computed_by_hand(
    num_instances: int, objective: Objective, num_long_tail: int
) -> None:
    plan = plan_by_skewness(
        list(range(1, 1025)),
        num_instances,
        token_latency=PTL,
        max_batch=64,
        length_p50=3241,
        length_p90=13063,
        objective=objective,
    )
    assert plan.num_long_tail == num_long_tail


def test_token_latency_is_linear_between_points_and_constant_outside() -> None:
    latency = TokenLatency({2: 1.0, 4: 3.0})
    assert [latency(size) for size in (1, 2, 3, 4, 9)] == [1.0, 1.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize("points", [{}, {0: 1.0}, {1: 0.0}, {1: math.nan}])
def test_a_latency_that_cannot_be_is_refused(points: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="latency"):
        TokenLatency(points)


def test_an_instance_works_in_waves() -> None:
    latency = TokenLatency({1: 0.5, 4: 2.0})
    assert instance_latency_s(0, 10, 4, latency) == 0
    assert instance_latency_s(1, 10, 4, latency) == 5
    assert instance_latency_s(9, 10, 4, latency) == 2.0 * 10 * 3


def test_one_instance_draws_everything_the_longest_first() -> None:
    plan = plan_by_skewness([5, 9, 9, 1], 1, token_latency=PTL, max_batch=8, length_p50=5, length_p90=9)
    assert plan.num_long_tail == 0
    assert plan.instances == [[1, 2, 0, 3]]


def by_definition(
    lengths: list[int], num_instances: int, max_batch: int, p50: float, p90: float, alpha: float, objective: Objective
) -> int:
    """Algorithm 2 as it is printed, one number of long-tail instances after the other."""
    num_long = math.floor(alpha * len(lengths))

    def side(answers: int, mean: float, instances: int) -> float:
        if answers == 0:
            return 0.0
        each = math.ceil(answers / instances)
        batch = min(each, max_batch)
        return PTL(batch) * mean * math.ceil(each / batch)

    best, chosen = math.inf, 0
    for count in range(1, num_instances):
        parts = side(num_long, p90, count), side(len(lengths) - num_long, p50, num_instances - count)
        value = sum(parts) if objective == "sum" else max(parts)
        if value < best * (1 - 1e-9):
            best, chosen = value, count
    return chosen


@given(
    lengths=st.lists(st.integers(1, 30_000), min_size=1, max_size=300),
    num_instances=st.integers(2, 20),
    max_batch=st.integers(1, 64),
    p50=st.floats(1, 5000),
    tail=st.floats(1, 10),
    alpha=st.sampled_from([0.0, 0.1, 0.2, 0.5, 1.0]),
    objective=st.sampled_from(["sum", "max"]),
)
def test_a_plan_is_algorithm_2_and_holds_every_answer_once(
    lengths: list[int],
    num_instances: int,
    max_batch: int,
    p50: float,
    tail: float,
    alpha: float,
    objective: Objective,
) -> None:
    plan = plan_by_skewness(
        lengths,
        num_instances,
        token_latency=PTL,
        max_batch=max_batch,
        length_p50=p50,
        length_p90=p50 * tail,
        alpha=alpha,
        objective=objective,
    )
    assert plan.num_long_tail == by_definition(lengths, num_instances, max_batch, p50, p50 * tail, alpha, objective)
    assert sorted(index for share in plan.instances for index in share) == list(range(len(lengths)))
    long_tail = {index for share in plan.instances[: plan.num_long_tail] for index in share}
    assert len(long_tail) == math.floor(alpha * len(lengths))
    regular = set(range(len(lengths))) - long_tail
    if long_tail and regular:
        assert min(lengths[index] for index in long_tail) >= max(lengths[index] for index in regular)
    for part in (plan.instances[: plan.num_long_tail], plan.instances[plan.num_long_tail :]):
        sizes = [len(share) for share in part]
        assert max(sizes, default=0) - min(sizes, default=0) <= 1
    for share in plan.instances:
        assert share == sorted(share, key=lambda index: (-lengths[index], index))
