"""What moves, and what had better stay."""

from typing import Any

import numpy as np
import pytest

from benchmarks.paper_workload import PREFILL_TOKEN_S, TOKEN_LATENCY
from streamrl.planning.forecast import LengthForecast
from streamrl.planning.moves import Move, Rules, choose_moves
from streamrl.planning.profile import InstanceProfile
from streamrl.planning.standing import Standing

PROFILE = InstanceProfile(TOKEN_LATENCY, 8, prefill_token_s=PREFILL_TOKEN_S)


def standing(answers: list[tuple[float, int, bool, float]]) -> Standing:
    """From (whole length, instance, whether it runs, tokens there) of each."""
    lengths, instance, running, there = (np.array(column) for column in zip(*answers, strict=True))
    size = len(answers)
    return Standing(
        LengthForecast.exact(lengths.astype(float)), np.arange(size), instance.astype(np.int64), running.astype(bool),
        there.astype(float), np.zeros(size), -lengths.astype(float),
    )  # fmt: skip


def moves(answers: list[tuple[float, int, bool, float]], size: int = 2, **other: Any) -> list[Move]:
    return choose_moves(standing(answers), [PROFILE] * size, Rules(**{"transfer_s": 0.3, **other}))


def test_waiting_answers_leave_an_instance_that_ends_late() -> None:
    busy = [(5000.0, 0, True, 0.0)] * 8 + [(5000.0, 0, False, 0.0)] * 8
    found = moves([*busy, (200.0, 1, True, 0.0)])
    assert found
    assert all(move.target == 1 and move.answer >= 8 for move in found)


def test_nothing_moves_when_all_end_together() -> None:
    assert moves([(1000.0, index % 2, True, 0.0) for index in range(8)]) == []


def test_a_long_answer_leaves_a_crowd_for_an_idle_instance() -> None:
    crowd = [(15_000.0, 0, True, 3000.0)] * 7
    found = moves([(20_000.0, 0, True, 3000.0), *crowd])
    assert Move(0, 1) in found


def test_a_running_answer_stays_when_moving_costs_more_than_it_spares() -> None:
    answers = [(3050.0, 0, True, 3000.0), *[(3050.0, 0, True, 3000.0)] * 5]
    assert moves(answers) == []
    crowd = [(15_000.0, 0, True, 3000.0)] * 7
    assert moves([(20_000.0, 0, True, 3000.0), *crowd], transfer_s=500.0) == []


def test_nothing_moves_when_all_is_over_before_a_move_could_help() -> None:
    def half_full(num_tokens: float) -> list[Move]:
        return moves([(num_tokens, 0, True, 0.0)] * 8 + [(num_tokens, 0, False, 0.0)] * 8)

    assert half_full(5000.0)
    assert half_full(50.0) == []


def test_running_answers_stay_when_they_may_not_move() -> None:
    crowd = [(15_000.0, 0, True, 3000.0)] * 7
    assert moves([(20_000.0, 0, True, 3000.0), *crowd], move_running=False) == []


def test_what_must_not_move_stays() -> None:
    crowd = [(15_000.0, 0, True, 3000.0)] * 7
    movable = np.array([False] + [True] * 7)
    assert all(move.answer != 0 for move in moves([(20_000.0, 0, True, 3000.0), *crowd], movable=movable))


def test_a_running_answer_goes_only_where_the_weights_are_the_same() -> None:
    answers = [(20_000.0, 0, True, 3000.0), *[(15_000.0, 0, True, 3000.0)] * 7]
    found = moves(answers, size=3, versions=np.array([1, 2, 1]))
    assert found
    assert {move.target for move in found} == {2}
    waiting = [(5000.0, 0, True, 0.0)] * 8 + [(5000.0, 0, False, 0.0)] * 8
    assert moves(waiting, versions=np.array([1, 2]))


@pytest.mark.parametrize("size", [1, 2])
def test_an_idle_fleet_moves_nothing(size: int) -> None:
    nothing = np.zeros(0)
    indices = np.zeros(0, dtype=np.int64)
    idle = Standing(LengthForecast.exact([]), indices, indices, indices.astype(bool), nothing, nothing, nothing)
    assert choose_moves(idle, [PROFILE] * size, Rules(transfer_s=0.3)) == []
