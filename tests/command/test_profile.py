"""`streamrl profile` as a user calls it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


def profiled(folder: Path, *arguments: str, engine: str = "fake") -> "subprocess.CompletedProcess[str]":
    config = folder / "config.toml"
    config.write_text(f'[model]\npath = "tiny"\n[generator]\nengine = "{engine}"\nmax_running = 8\n')
    command = [sys.executable, "-m", "streamrl.command.main", "profile", str(config), "--json", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fake", pytest.param("vllm", marks=pytest.mark.engine)])
def test_the_profile_is_told_and_written(engine: str, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    ended = profiled(tmp_path, "--out", str(file), engine=engine)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert (told["model"], told["engine"], told["max_running"]) == ("tiny", engine, 8)
    assert min(told["ptl_ms"].values()) > 0
    assert {"1", "8"} <= told["ptl_ms"].keys()
    assert json.loads(file.read_text()) == told


def test_settings_that_leave_no_time_to_measure_are_refused(tmp_path: Path) -> None:
    ended = profiled(tmp_path, "--set", "generator.profile_s=0")
    assert ended.returncode == 2
    assert "generator.profile_s is 0" in json.loads(ended.stdout)["error"]["message"]


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "nowhere" / "profile.json"
    ended = profiled(tmp_path, "--out", str(file))
    assert ended.returncode == 2
    assert f"{file} cannot be written" in json.loads(ended.stdout)["error"]["message"]
    assert "measured" not in ended.stderr
