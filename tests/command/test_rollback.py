"""The command `streamrl rollback`: which checkpoints are left, and what it refuses."""

import json
from pathlib import Path

import pytest

from streamrl.command.main import run_command
from streamrl.run_folder import RunFolder
from trainer_svc.checkpoint import checkpoints


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run that was resumed from version 10 once, and is completed."""
    for attempt, iteration in ((1, 5), (1, 10), (1, 15), (2, 15), (2, 20)):
        (tmp_path / "r" / "checkpoints" / f"attempt-{attempt:04d}-iteration-{iteration:06d}").mkdir(parents=True)
    run_folder = RunFolder(tmp_path / "r")
    assert [run_folder.begin_attempt(), run_folder.last_attempt()] == [3, 3]
    run_folder.write_summary({"status": "completed", "iterations": 20})
    return run_folder


def _left(folder: RunFolder) -> list[tuple[int, int]]:
    """As the command sees them, and as the trainer does."""
    seen = folder.checkpoints()
    assert [checkpoint.path for checkpoint in seen] == checkpoints(folder.path / "checkpoints")
    return [(checkpoint.attempt, checkpoint.iteration) for checkpoint in seen]


def test_the_newest_checkpoint_of_the_version_becomes_the_newest_of_all(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["rollback", str(folder.path), "--version", "15", "--json"]) == 0
    assert _left(folder) == [(1, 5), (1, 10), (1, 15), (2, 15)]
    told = json.loads(capsys.readouterr().out)
    assert told == {"run_id": "r", "weight_version": 15, "set_aside": ["attempt-0002-iteration-000020"]}
    assert (folder.path / "checkpoints" / "rolled_back" / "attempt-0002-iteration-000020").is_dir()


def test_a_completed_run_that_went_back_is_not_completed_and_no_attempt_has_a_number_again(folder: RunFolder) -> None:
    assert run_command(["rollback", str(folder.path), "--version", "5"]) == 0
    assert _left(folder) == [(1, 5)]
    assert not folder.is_completed()
    assert folder.begin_attempt() == 4


def test_version_0_is_the_beginning(folder: RunFolder) -> None:
    assert run_command(["rollback", str(folder.path), "--version", "0"]) == 0
    assert not folder.has_checkpoint()


def test_a_version_without_a_checkpoint_is_refused_and_nothing_changes(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["rollback", str(folder.path), "--version", "12"]) == 2
    assert "no checkpoint of weight version 12: one can go back to 0, 5, 10, 15, 20" in capsys.readouterr().err
    assert len(_left(folder)) == 5
    assert folder.is_completed()


def test_a_run_that_runs_is_refused(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    with folder.lock():
        assert run_command(["rollback", str(folder.path), "--version", "5"]) == 2
    assert "is run by another command" in capsys.readouterr().err
