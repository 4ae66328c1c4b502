"""The oracle's file, and what else the settings of lengths name."""

import json
from pathlib import Path

import pytest

from scheduler_svc.known_lengths import read_known_lengths
from scheduler_svc.main import check
from scheduler_svc.settings import SchedulerSection, SchedulerSettings


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


def test_a_base_model_that_is_neither_here_nor_a_hub_name_is_refused_before_a_run(tmp_path: Path) -> None:
    def checked(base_model: str) -> None:
        check(SchedulerSettings(scheduler=SchedulerSection(ranker_base_model=base_model)))

    checked("owner/name")
    with pytest.raises(ValueError, match=r"scheduler\.ranker_base_model: there is no folder .*/nowhere "):
        checked(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"has no config\.json"):
        checked(str(tmp_path))
    (tmp_path / "config.json").touch()
    checked(str(tmp_path))
