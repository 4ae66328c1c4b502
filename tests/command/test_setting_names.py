"""Names and values of settings as people write them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.command.setting_names import (
    join_free_tables,
    known_names,
    parse_assignment,
    parse_value,
    suggestion,
    unknown_names,
    without,
)
from streamrl.command.settings import Settings


def test_every_section_has_names() -> None:
    sections = {name.partition(".")[0] for name in known_names(Settings)}
    assert sections == set(Settings.model_fields)


@pytest.mark.parametrize(
    ("unknown", "meant"),
    [
        ("trainer.num_iteration", "trainer.num_iterations"),
        ("trainer.max_tokens", "generator.max_tokens"),
        ("rewards", "reward"),
        ("pipeline.staleness", "pipeline.max_staleness"),
        ("kafka.bootstrap_server", "kafka.bootstrap_servers"),
        ("sites.west.weigths", "sites.west.weights"),
        ("sites.west.kafka.bootstrap_server", "sites.west.kafka.bootstrap_servers"),
    ],
)
def test_the_nearest_known_name_is_suggested(unknown: str, meant: str) -> None:
    assert suggestion(unknown, Settings) == f"did you mean {meant}?"


def test_a_name_like_no_other_is_answered_with_what_there_is() -> None:
    assert suggestion("pipeline.qqqq", Settings) == "pipeline has mode, max_staleness"
    assert suggestion("qqqq", Settings).startswith("sections are data, eval,")


@given(st.sampled_from(known_names(Settings)))
def test_no_known_name_is_unknown(name: str) -> None:
    value: Any = 1
    for part in reversed(name.split(".")):
        value = {part: value}
    assert list(unknown_names(value, Settings)) == []


def test_unknown_names_are_found_and_left_out() -> None:
    values = {"trainer": {"num_iterations": 1, "oops": 2}, "else": {"x": 1}, "run": {"id": "a"}}
    unknown = set(unknown_names(values, Settings))
    assert unknown == {"trainer.oops", "else"}
    assert without(values, unknown) == {"trainer": {"num_iterations": 1}, "run": {"id": "a"}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-4", 1e-4),
        ("true", True),
        ('"3"', "3"),
        ("[1, 2]", [1, 2]),
        ("plain", "plain"),
        ("a = b", "a = b"),
    ],
)
def test_a_value_is_toml_or_else_text(text: str, value: Any) -> None:
    assert parse_value(text) == value


@pytest.mark.parametrize(
    ("assignment", "values"),
    [
        ("trainer.num_iterations=10", {"trainer": {"num_iterations": 10}}),
        ("run.id=007", {"run": {"id": "007"}}),
        ("mlflow.experiment=2026", {"mlflow": {"experiment": "2026"}}),
        ("kafka.client.sasl.password=a=b", {"kafka": {"client": {"sasl.password": "a=b"}}}),
        ('kafka.client."sasl.password"=x', {"kafka": {"client": {"sasl.password": "x"}}}),
        ("reward.functions=exact_match", {"reward": {"functions": "exact_match"}}),
        ("reward.functions.my_rewards:score=0.5", {"reward": {"functions": {"my_rewards:score": 0.5}}}),
        ("data.reasoning_gym.min_terms=3", {"data": {"reasoning_gym": {"min_terms": 3}}}),
        ("oops.key=1", {"oops": {"key": 1}}),
    ],
)
def test_an_assignment_becomes_a_nested_value(assignment: str, values: dict[str, Any]) -> None:
    assert parse_assignment(assignment, Settings) == values


@pytest.mark.parametrize("assignment", ["trainer.num_iterations", "num_iterations=3", "=3", "trainer.=3"])
def test_what_is_no_assignment_is_refused(assignment: str) -> None:
    with pytest.raises(ValueError, match=r"expected SECTION\.KEY=VALUE"):
        parse_assignment(assignment, Settings)


def test_dotted_names_in_a_table_of_values_are_one_name() -> None:
    values = {
        "kafka": {"client": {"sasl": {"password": "x", "mechanism": "PLAIN"}}},
        "data": {"reasoning_gym": {"a": {}}},
    }
    assert join_free_tables(values, Settings) == {
        "kafka": {"client": {"sasl.password": "x", "sasl.mechanism": "PLAIN"}},
        "data": {"reasoning_gym": {"a": {}}},
    }
