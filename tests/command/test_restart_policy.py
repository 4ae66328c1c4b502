"""What becomes of a run when a service ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.command.restart_policy import WINDOW_S, Decision, decide


def _decide(service: str, exit_code: int, *, was_ready: bool = True, deaths: int = 1, budget: int = 3) -> Decision:
    return decide(service, exit_code, was_ready=was_ready, deaths_s=[0.0] * deaths, max_restarts=budget)


def test_the_trainer_ends_a_run_and_a_generator_may_be_drained() -> None:
    assert _decide("trainer", 0).action == "done"
    assert _decide("generator", 0).action == "done"


@pytest.mark.parametrize("service", ["scheduler", "weights"])
@pytest.mark.parametrize("exit_code", [0, 1, 2, -9])
def test_a_service_that_serves_others_may_not_end(service: str, exit_code: int) -> None:
    assert _decide(service, exit_code).action == "fail"


@pytest.mark.parametrize("exit_code", [1, 2, -9])
def test_a_trainer_that_fails_ends_the_run(exit_code: int) -> None:
    assert _decide("trainer", exit_code).action == "fail"


def test_a_generator_that_was_ready_is_started_again() -> None:
    assert _decide("generator", 1).action == "restart"
    assert _decide("generator", -9).action == "restart"


def test_a_generator_that_never_was_ready_is_not_unless_it_was_killed() -> None:
    assert _decide("generator", 1, was_ready=False).action == "fail"
    assert _decide("generator", -9, was_ready=False).action == "restart"


def test_bad_input_is_never_tried_again() -> None:
    assert _decide("generator", 2).action == "fail"


def test_deaths_long_ago_do_not_count() -> None:
    deaths = [0.0, WINDOW_S + 1, WINDOW_S + 2, WINDOW_S + 3]
    assert decide("generator", 1, was_ready=True, deaths_s=deaths, max_restarts=1).action == "restart"


@given(budget=st.integers(0, 20), deaths=st.integers(1, 30))
def test_the_budget_bounds_restarts_and_their_delay_grows(budget: int, deaths: int) -> None:
    decision = _decide("generator", 1, deaths=deaths, budget=budget)
    assert (decision.action == "restart") == (deaths <= budget)
    if decision.action == "restart":
        assert decision.delay_s == min(2.0 ** (deaths - 1), 30.0)
