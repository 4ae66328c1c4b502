"""Tests of trainer_svc.model_cache."""

import multiprocessing
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from trainer_svc.model_cache import default_cache_folder, made_once


def _make(log: Path, folder: Path) -> None:
    (folder / "part").mkdir()
    (folder / "part" / "file").write_text("whole")
    with log.open("a") as lines:
        lines.write("made\n")


def _make_and_die(folder: Path) -> None:
    (folder / "half").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)


def _make_in_process(target: Path, log: Path) -> None:
    made_once(target, partial(_make, log))


def test_a_folder_is_made_once_and_then_taken(tmp_path: Path) -> None:
    target, log = tmp_path / "models" / "one", tmp_path / "log"
    for _ in range(2):
        assert made_once(target, partial(_make, log)) == target
    assert (target / "part" / "file").read_text() == "whole"
    assert log.read_text() == "made\n"


def test_several_processes_make_it_once(tmp_path: Path) -> None:
    target, log = tmp_path / "one", tmp_path / "log"
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_make_in_process, args=(target, log)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert log.read_text() == "made\n"


def test_a_killed_maker_leaves_nothing_that_is_taken(tmp_path: Path) -> None:
    target, log = tmp_path / "one", tmp_path / "log"
    process = multiprocessing.get_context("spawn").Process(target=made_once, args=(target, _make_and_die))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not target.exists()
    made_once(target, partial(_make, log))
    assert sorted(path.name for path in target.iterdir()) == ["part"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "one", "one.lock"]


def test_a_failing_maker_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        made_once(tmp_path / "one", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["one.lock"]


def test_the_cache_is_where_xdg_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_folder() == tmp_path / "streamrl"
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert default_cache_folder() == Path.home() / ".cache" / "streamrl"
