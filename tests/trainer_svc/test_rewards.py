"""Tests of trainer_svc.rewards, trainer_svc.reward_functions and trainer_svc.math_verifier."""

import math
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_svc.math_verifier import MathVerifier
from trainer_svc.reward_functions import exact_match, find_last_number, graded, last_number, reasoning_gym
from trainer_svc.rewards import RewardError, RewardInput, check_rewards, load_rewards


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module `own_rewards` in the current folder; write it, then load it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    sys.modules.pop("own_rewards", None)
    yield tmp_path / "own_rewards.py"
    sys.modules.pop("own_rewards", None)


def sample(
    response: str, answer: str, *, finished: bool = True, metadata: Mapping[str, Any] | None = None
) -> RewardInput:
    return RewardInput("What is it?", response, answer, finished, metadata or {})


def test_exact_match_ignores_blanks_around_and_needs_the_end() -> None:
    assert exact_match(response=" 48 49\n", answer="48 49", finished=True) == 1.0
    assert exact_match(response="48 49", answer="48 49", finished=False) == 0.0
    assert exact_match(response="48  49", answer="48 49", finished=True) == 0.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 5-3 = 2", 2),
        ("5-3", 3),
        ("it is -3", -3),
        ("it is −3.", -3),
        ("x=-3", -3),
        ("1,234,567.50 dollars", Decimal("1234567.5")),
        ("1,2", 2),
        ("take .5", Decimal("0.5")),
        ("#### 42", 42),
        ("(7)-2", 2),
        ("none", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_text(text: str, number: Decimal | int | None) -> None:
    assert find_last_number(text) == number


@given(st.integers(-(10**9), 10**9), st.text(st.characters(categories=["L", "Zs"]), max_size=20))
def test_a_number_at_the_end_is_found_with_and_without_commas(number: int, before: str) -> None:
    assert find_last_number(f"{before} {number}") == number
    assert find_last_number(f"{before} {number:,}") == number


def test_last_number_needs_the_end_since_a_cut_may_change_it() -> None:
    assert last_number(response="it is 42", answer="#### 42.0", finished=True) == 1.0
    assert last_number(response="it is 42", answer="42", finished=False) == 0.0
    with pytest.raises(ValueError, match="holds no number"):
        last_number(response="1", answer="one", finished=True)


def test_graded_gives_part_marks_in_order() -> None:
    def mark(response: str, *, finished: bool = True) -> float:
        return graded(response=response, answer="12", finished=finished)

    assert mark(" 12\n") == 1.0
    assert mark("12", finished=False) == 0.3
    assert mark("7 + 5 = 12") == 0.3
    assert mark("13") == 0.1
    assert mark("it is 13") == 0.0


def test_reasoning_gym_asks_the_checker_of_the_task() -> None:
    metadata = {"task": "chain_sum", "task_options": {"max_digits": 2}}

    def score(response: str, *, finished: bool = True) -> float:
        return reasoning_gym(prompt="3 + 4", response=response, answer="7", finished=finished, metadata=metadata)

    assert score("7") == 1.0
    assert score("I think <answer> 7 </answer>") == 1.0
    assert score("8") < 1.0
    assert score("7", finished=False) == 0.0
    with pytest.raises(ValueError, match="does not come from a task"):
        reasoning_gym(prompt="", response="", answer="", finished=True, metadata={})


def test_values_are_weighted_and_added() -> None:
    rewards = load_rewards({"exact_match": 2.0, "last_number": 0.5})
    score = rewards.score(sample("it is 42", "42"))
    assert score.values == {"exact_match": 0.0, "last_number": 1.0}
    assert score.total == 0.5
    assert load_rewards(["exact_match", "last_number"]).score(sample("42", "42")).total == 2.0


def test_an_own_function_takes_any_of_the_arguments_by_name(own_module: Path) -> None:
    own_module.write_text(
        "def short(response, *, scale=2.0):\n    return scale / (1 + len(response))\n"
        "def everything(**known):\n    return float(sorted(known) == "
        "['answer', 'finished', 'metadata', 'prompt', 'response'])\n"
    )
    rewards = load_rewards(["own_rewards:short", "own_rewards:everything"])
    assert rewards.score(sample("a", "b")).values == {"own_rewards:short": 1.0, "own_rewards:everything": 1.0}
    assert math.isfinite(rewards.check("prompt", "answer", {}).total)


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ([], "is empty"),
        (["exact_mach"], r"no reward named 'exact_mach' \(did you mean exact_match\?\)"),
        (["exact_match", "exact_match"], "more than once"),
        ({"exact_match": math.nan}, "expected a finite number"),
        (["no_such_module_of_rewards:f"], "there is no module no_such_module_of_rewards"),
        (["no_such.module:f"], r"there is no module no_such\.module"),
        (["..x:f"], r"there is no module \.\.x"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_is_imported(functions: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_rewards(functions)
    with pytest.raises(ValueError, match=message):
        load_rewards(functions)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def scores(): ...", r"no function score \(did you mean scores\?\)"),
        ("score = 3", "no function score"),
        ("def score(respons): ...", r"asks for 'respons' \(did you mean response\?\)"),
        ("def score(response, /): ...", "by position only"),
        ("async def score(response): ...", "is async"),
        ("import no_such_thing_at_all", "raised ModuleNotFoundError"),
        ("def score(", "raised SyntaxError"),
    ],
)
def test_an_own_function_that_cannot_work_is_refused(own_module: Path, code: str, message: str) -> None:
    own_module.write_text(code)
    for look in (check_rewards, load_rewards):
        with pytest.raises(ValueError, match=message):
            look(["own_rewards:score"])


@pytest.mark.parametrize(
    "code",
    [
        "return None",
        "return 'x'",
        "return float('nan')",
        "return 1e31",
        "return 1 / 0",
        "return 1j",
        "return 10**400",
        "raise SystemExit(1)",
    ],
)
def test_a_failing_function_gives_an_error_and_never_a_reward(own_module: Path, code: str) -> None:
    own_module.write_text(f"def score(response):\n    {code}\n")
    rewards = load_rewards(["own_rewards:score"])
    with pytest.raises(RewardError, match=r"own_rewards:score.*response='an answer'"):
        rewards.score(sample("an answer", "key"))
    with pytest.raises(ValueError, match=r"tried before the run, reward own_rewards:score"):
        rewards.check("prompt", "answer", {})


def test_the_check_names_a_key_that_a_named_reward_cannot_use() -> None:
    with pytest.raises(ValueError, match="the key 'none' holds no number"):
        load_rewards(["last_number"]).check("prompt", "none", {})
    assert load_rewards(["exact_match"]).check("prompt", "key", {}).total == 1.0


@pytest.fixture(scope="module")
def verifier() -> Iterator[MathVerifier]:
    verifier = MathVerifier(cpu_seconds=3.0)
    yield verifier
    verifier.close()


def test_math_is_compared_by_meaning_on_any_thread(verifier: MathVerifier) -> None:
    verdicts: list[bool] = []

    def compare() -> None:
        verdicts.append(verifier.verify(response=r"so it is $\boxed{\frac{2}{4}}$", answer="1/2"))
        verdicts.append(verifier.verify(response="so it is 42", answer="reasons\n#### 42"))
        verdicts.append(verifier.verify(response=r"$\boxed{x+1}$", answer=r"1+x"))
        verdicts.append(verifier.verify(response="it is 3", answer="4"))
        verdicts.append(verifier.verify(response="", answer="4"))

    thread = threading.Thread(target=compare)
    thread.start()
    thread.join()
    assert verdicts == [True, True, True, False, False]


def test_an_answer_too_large_to_check_is_wrong_and_the_next_is_checked(verifier: MathVerifier) -> None:
    assert not verifier.verify(response="$9^{9^{9^{9}}} + 1$", answer="7")
    assert verifier.verify(response="7", answer="7")


def test_a_verifier_that_was_killed_is_started_again(verifier: MathVerifier) -> None:
    os.kill(verifier._process.pid, signal.SIGKILL)
    assert verifier.verify(response="7", answer="7")


def test_math_verify_is_a_reward_by_name() -> None:
    rewards = load_rewards(["math_verify"])
    try:
        assert rewards.check("prompt", r"\frac{1}{2}", {}).total == 1.0
        assert rewards.score(sample("0.5", r"\frac{1}{2}")).total == 1.0
        assert rewards.score(sample("0.5", r"\frac{1}{2}", finished=False)).total == 0.0
    finally:
        rewards.close()
