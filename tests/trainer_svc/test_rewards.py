"""Tests of trainer_svc.rewards, trainer_svc.reward_functions and trainer_svc.reward_lookup."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_svc.data_sources import Fields, open_source
from trainer_svc.reward_functions import exact_match, find_last_number, graded, last_number, reasoning_gym
from trainer_svc.reward_input import RewardError, RewardInput
from trainer_svc.reward_lookup import NAMED
from trainer_svc.rewards import RewardSum, check_rewards, load_rewards
from trainer_svc.settings import RewardSection


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module `own_rewards` in the current folder; write it, then load it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "own_rewards.py"


@pytest.fixture
def load() -> Iterator[Callable[..., RewardSum]]:
    """Loads rewards, which end with the test."""
    loaded: list[RewardSum] = []

    def load(functions: Any, **section: Any) -> RewardSum:
        loaded.append(load_rewards(RewardSection(functions=functions, **{"num_workers": 1, **section})))
        return loaded[-1]

    yield load
    for rewards in loaded:
        rewards.close()


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
    source = open_source("reasoning_gym:chain_sum", fields=Fields(), task_options={"max_digits": 2}, seed=1, held_out=5)
    record = source.read(3, 4)[0]
    metadata = RewardInput("", "", "", True, record.metadata).to_json(("metadata",))["metadata"]

    def score(response: str, *, finished: bool = True) -> float:
        return reasoning_gym(response=response, finished=finished, metadata=json.loads(json.dumps(metadata)))

    assert score(record.answer) == 1.0
    assert score(f"I think <answer> {record.answer} </answer>") == 1.0
    assert score(f"{record.answer}1") < 1.0
    assert score(record.answer, finished=False) == 0.0
    with pytest.raises(ValueError, match="does not come from a task"):
        reasoning_gym(response="", finished=True, metadata={})


def test_values_are_weighted_and_added(load: Callable[..., RewardSum]) -> None:
    rewards = load({"exact_match": 2.0, "last_number": 0.5})
    score = rewards.score(sample("it is 42", "42"))
    assert score.values == {"exact_match": 0.0, "last_number": 1.0}
    assert score.total == 0.5
    assert load(["exact_match", "last_number"]).score(sample("42", "42")).total == 2.0


def test_an_own_function_takes_any_of_the_arguments_by_name(own_module: Path, load: Callable[..., RewardSum]) -> None:
    own_module.write_text(
        "def short(response, *, scale=2.0):\n    return scale / (1 + len(response))\n"
        "def everything(**known):\n    return float(sorted(known) == "
        "['answer', 'finished', 'metadata', 'prompt', 'response'])\n"
    )
    rewards = load(["own_rewards:short", "own_rewards:everything"])
    assert rewards.score(sample("a", "b")).values == {"own_rewards:short": 1.0, "own_rewards:everything": 1.0}
    assert math.isfinite(rewards.check("prompt", "answer", {}).total)


def test_metadata_reaches_a_function_as_json_says_it(own_module: Path, load: Callable[..., RewardSum]) -> None:
    own_module.write_text(
        "def score(metadata):\n"
        "    return float(metadata == {'1': [1, 2], 'set': [3], 'number': 2.5, 'rows': [[1, 0]], 'other': '1.50'})\n"
    )
    rows = np.eye(2, dtype=int)[:1]
    metadata: Any = {1: (1, 2), "set": {3}, "number": np.float32(2.5), "rows": rows, "other": Decimal("1.50")}
    assert load(["own_rewards:score"]).score(sample("", "", metadata=metadata)).total == 1.0


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ([], "at least one reward function"),
        (["exact_match", "exact_match"], "more than once"),
        ({"exact_match": math.nan}, "finite number"),
        (["exact_mach"], r"no reward named 'exact_mach' \(did you mean exact_match\?\)"),
        (["http://:80/score"], "is no address"),
        (["https://host:port/score"], "is no address"),
        (["no_such_module_of_rewards:f"], "there is no module no_such_module_of_rewards"),
        (["no_such.module:f"], r"there is no module no_such\.module"),
        (["..x:f"], r"there is no module \.\.x"),
    ],
)
def test_a_wrong_setting_is_refused(functions: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_rewards(RewardSection(functions=functions))


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
        ("import os; os._exit(3)", r"ended the process \(exit code 3\)"),
    ],
)
def test_an_own_function_that_cannot_work_is_refused(own_module: Path, code: str, message: str) -> None:
    own_module.write_text(code)
    with pytest.raises(ValueError, match=message):
        check_rewards(RewardSection(functions=["own_rewards:score"]))


def test_a_failing_function_gives_an_error_and_never_a_reward(own_module: Path, load: Callable[..., RewardSum]) -> None:
    codes = ("None", "'x'", "float('nan')", "1e31", "1 / 0", "1j", "10**400", "exit(1)", "'x' * 5000")
    own_module.write_text(
        f"def score(response):\n    return [lambda c=c: eval(c) for c in {codes!r}][int(response)]()\n"
    )
    rewards = load(["own_rewards:score"])
    for index in range(len(codes)):
        with pytest.raises(RewardError, match=rf"own_rewards:score.*response='{index}'") as failed:
            rewards.score(sample(str(index), "key"))
        assert len(str(failed.value)) < 1500
    own_module.write_text("def score(response):\n    return 1 / len(response)\n")
    with pytest.raises(ValueError, match=r"tried before the run, reward own_rewards:score raised ZeroDivisionError"):
        load(["own_rewards:score"]).check("prompt", "answer", {})


def test_the_check_names_a_key_that_a_named_reward_cannot_use(load: Callable[..., RewardSum]) -> None:
    with pytest.raises(ValueError, match="the key 'none' holds no number"):
        load(["last_number"]).check("prompt", "none", {})
    assert load(["exact_match"]).check("prompt", "key", {}).total == 1.0


def test_math_is_compared_by_meaning_and_too_much_of_it_is_wrong(
    load: Callable[..., RewardSum], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NAMED, "math_verify", replace(NAMED["math_verify"], cpu_limit_s=1.0))
    rewards = load(["math_verify"])
    assert rewards.check("prompt", r"\frac{1}{2}", {}).total == 1.0
    for response, answer, finished, expected in (
        (r"so it is $\boxed{\frac{2}{4}}$", "1/2", True, 1.0),
        ("so it is 42", "reasons\n#### 42", True, 1.0),
        (r"$\boxed{x+1}$", r"1+x", True, 1.0),
        ("it is 3", "4", True, 0.0),
        ("", "4", True, 0.0),
        ("0.5", r"\frac{1}{2}", False, 0.0),
        ("$9^{9^{9^{9}}} + 1$", "7", True, 0.0),
        ("7", "7", True, 1.0),
    ):
        assert rewards.score(sample(response, answer, finished=finished)).total == expected, response
    with pytest.raises(RewardError, match="is not mathematics"):
        rewards.score(sample("7", ""))
