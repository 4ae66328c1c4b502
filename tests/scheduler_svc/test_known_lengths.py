"""The oracle's file."""

import json
from pathlib import Path

import pytest

from scheduler_svc.known_lengths import read_known_lengths
from scheduler_svc.settings import SchedulerSection


def test_a_prompt_has_one_length_or_several(tmp_path: Path) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps({"a": 7, "b": [3, 4.5]}))
    assert read_known_lengths(file) == {"a": [7.0], "b": [3.0, 4.5]}


@pytest.mark.parametrize("value", [[], [0], "7", True, [None], -1, {"a": 1}])
def test_what_is_no_length_is_named(tmp_path: Path, value: object) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps({"the-prompt": value}))
    with pytest.raises(ValueError, match="the-prompt"):
        read_known_lengths(file)


def test_a_file_that_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"scheduler\.length_file: there is no file"):
        read_known_lengths(tmp_path / "lengths.json")
    (tmp_path / "lengths.json").write_text("[1]")
    with pytest.raises(ValueError, match="expected a JSON object, got a list"):
        read_known_lengths(tmp_path / "lengths.json")


def test_settings_that_do_not_go_together_are_refused() -> None:
    for settings in (
        {"length_model": "oracle"},
        {"length_model": "history", "length_file": "lengths.json"},
        {"length_model": "history", "ranker_base_model": "a/model"},
    ):
        with pytest.raises(ValueError, match=r"scheduler\."):
            SchedulerSection.model_validate(settings)
    SchedulerSection.model_validate({"length_model": "oracle", "length_file": "lengths.json"})
