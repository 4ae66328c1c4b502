"""What becomes of a run when one of its processes ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.command.restart_policy import WINDOW_S, Death, Deaths, Decision, decide

SERVING = ("scheduler", "weights", "broker")
ALL = ("trainer", "generator", *SERVING)


def _decide(death: Death, *, deaths: int = 1, budget: int = 3) -> Decision:
    return decide(death, deaths_s=[0.0] * deaths, max_restarts=budget)


def test_the_trainer_ends_a_run_and_a_generator_may_be_drained() -> None:
    assert _decide(Death("trainer", 0)).action == "done"
    assert _decide(Death("generator", 0)).action == "done"


@pytest.mark.parametrize("service", ["generator", *SERVING])
@pytest.mark.parametrize("exit_code", [1, 2, -9])
def test_what_was_ready_is_started_again_alone(service: str, exit_code: int) -> None:
    assert _decide(Death(service, exit_code)) == Decision("restart", 1.0)


@pytest.mark.parametrize("service", SERVING)
def test_a_service_that_serves_others_comes_back_also_after_an_orderly_end(service: str) -> None:
    assert _decide(Death(service, 0)).action == "restart"


@pytest.mark.parametrize("exit_code", [1, 2, -9])
def test_a_dead_trainer_is_answered_by_the_next_attempt(exit_code: int) -> None:
    assert _decide(Death("trainer", exit_code)).action == "next_attempt"


def test_a_broker_that_lost_its_topics_is_answered_by_the_next_attempt() -> None:
    assert _decide(Death("broker", -9, loses_topics=True)).action == "next_attempt"


@pytest.mark.parametrize("service", ALL)
def test_what_never_was_ready_fails_the_run_unless_it_was_killed(service: str) -> None:
    assert _decide(Death(service, 1, was_ready=False)).action == "fail"
    assert _decide(Death(service, 2, was_ready=False)).action == "fail"
    assert _decide(Death(service, -9, was_ready=False)).action != "fail"


@pytest.mark.parametrize("kind", ["NoProgressError", "UnusableBatchError", "CheckpointError", "StaleAttemptError"])
def test_what_another_life_would_meet_again_fails_the_run(kind: str) -> None:
    assert _decide(Death("trainer", 1, error_kind=kind)).action == "fail"
    assert _decide(Death("trainer", 1, error_kind="BrokerUnavailableError")).action == "next_attempt"


def test_a_trainer_that_fails_twice_at_the_same_place_fails_the_run() -> None:
    assert _decide(Death("trainer", 1, in_vain=True)).action == "fail"
    assert _decide(Death("generator", 1, in_vain=True)).action == "restart"


def test_deaths_long_ago_do_not_count() -> None:
    deaths = [0.0, WINDOW_S + 1, WINDOW_S + 2, WINDOW_S + 3]
    assert decide(Death("generator", 1), deaths_s=deaths, max_restarts=1).action == "restart"


@given(service=st.sampled_from(ALL), budget=st.integers(0, 20), deaths=st.integers(1, 3000))
def test_the_budget_bounds_restarts_and_their_delay_grows(service: str, budget: int, deaths: int) -> None:
    decision = _decide(Death(service, -9), deaths=deaths, budget=budget)
    assert (decision.action != "fail") == (deaths <= budget)
    if decision.action != "fail":
        assert decision.delay_s == min(2.0 ** (deaths - 1), 30.0)


def test_a_great_budget_is_no_great_number() -> None:
    assert _decide(Death("weights", -9), deaths=5000, budget=10_000).delay_s == 30.0


def test_deaths_are_counted_by_process_within_the_window() -> None:
    deaths = Deaths()
    assert deaths.add("weights", 0.0) == [0.0]
    assert deaths.add("generator-0", 5.0) == [0.0]
    assert deaths.add("weights", 10.0) == [10.0, 0.0]
    assert deaths.add("weights", WINDOW_S + 5) == [WINDOW_S - 5, 0.0]
    assert (deaths.count("weights"), deaths.count("trainer")) == (3, 0)


def test_only_errors_at_the_same_iteration_are_in_vain() -> None:
    deaths = Deaths()
    assert not deaths.fails_in_vain("trainer", 1, iteration=3)
    assert not deaths.fails_in_vain("trainer", 1, iteration=4)
    assert not deaths.fails_in_vain("trainer", -9, iteration=4)
    assert not deaths.fails_in_vain("trainer", 1, iteration=4)
    assert deaths.fails_in_vain("trainer", 1, iteration=4)


@pytest.mark.parametrize("exit_code", [0, 1, 2, -9])
def test_a_trainer_that_has_completed_the_run_is_done_however_it_ends(exit_code: int) -> None:
    completed = Death("trainer", exit_code, error_kind="StorageError", was_ready=False, run_is_completed=True)
    assert _decide(completed, deaths=9).action == "done"
    assert _decide(Death("weights", -9, run_is_completed=True)).action == "restart"


def test_a_full_disk_fails_the_run() -> None:
    assert _decide(Death("trainer", 1, error_kind="StorageError")).action == "fail"
