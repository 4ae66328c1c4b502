import json
import os
import random
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from streamrl.errors import CheckpointError
from trainer_svc.checkpoint import checkpoints, load_checkpoint, load_state, save_checkpoint
from trainer_svc.ranks import Ranks


class SmallPolicy:
    """One number in one file."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def save(self, folder: Path) -> None:
        (folder / "deepspeed").mkdir()
        (folder / "deepspeed" / "weights.pt").write_text(str(self.value))

    def load(self, folder: Path) -> None:
        self.value = int((folder / "deepspeed" / "weights.pt").read_text())


def _save(folder: Path, iteration: int, *, attempt: int = 1, keep: int = 3, value: int | None = None) -> Path:
    policy = SmallPolicy(iteration if value is None else value)
    state = {"iteration": iteration}
    return save_checkpoint(
        folder, attempt=attempt, iteration=iteration, saved=policy, state=state, keep=keep, ranks=Ranks(0, 1)
    )


def _load(checkpoint: Path, ranks: Ranks | None = None) -> tuple[SmallPolicy, dict[str, object]]:
    policy = SmallPolicy()
    return policy, load_checkpoint(checkpoint, saved=policy, ranks=ranks or Ranks(0, 1))


def test_what_was_saved_is_loaded(tmp_path):
    checkpoint = _save(tmp_path, 7)
    policy, state = _load(checkpoint)
    assert policy.value == 7
    assert state == {"iteration": 7} == load_state(checkpoint)


def _draw() -> tuple[object, ...]:
    return torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.standard_normal(3).tolist()


def test_random_numbers_go_on_where_they_were(tmp_path):
    random.gauss(0, 1)
    np.random.standard_normal()
    checkpoint = _save(tmp_path, 1)
    expected = (torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.standard_normal(3).tolist())
    _load(checkpoint)
    assert expected == (
        torch.rand(3).tolist(),
        random.random(),
        random.gauss(0, 1),
        np.random.standard_normal(3).tolist(),
    )


def test_only_the_newest_are_kept(tmp_path):
    for iteration in range(1, 6):
        _save(tmp_path, iteration, keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == [
        "attempt-0001-iteration-000004",
        "attempt-0001-iteration-000005",
    ]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_later_attempt_is_newer_than_a_higher_iteration_of_an_earlier_one(tmp_path):
    _save(tmp_path, 12, attempt=1)
    _save(tmp_path, 11, attempt=2)
    assert load_state(checkpoints(tmp_path)[-1]) == {"iteration": 11}


def test_saving_one_iteration_twice_keeps_the_first(tmp_path):
    first = _save(tmp_path, 3, value=1)
    assert _save(tmp_path, 3, value=2) == first
    assert _load(first)[0].value == 1


def test_there_are_none_in_a_folder_that_is_not_there(tmp_path):
    assert checkpoints(tmp_path / "nowhere") == []


@pytest.mark.parametrize("name", ["deepspeed/weights.pt", "random-0.safetensors", "state.json"])
def test_a_changed_file_is_found_before_anything_is_loaded(tmp_path, name):
    checkpoint = _save(tmp_path, 7)
    damaged = bytearray((checkpoint / name).read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (checkpoint / name).write_bytes(damaged)
    policy = SmallPolicy(-1)
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(checkpoint, saved=policy, ranks=Ranks(0, 1))
    assert policy.value == -1


@pytest.mark.parametrize("change", ["missing", "added"])
def test_a_missing_or_added_file_is_found(tmp_path, change):
    checkpoint = _save(tmp_path, 7)
    path = checkpoint / "deepspeed" / ("weights.pt" if change == "missing" else "more.pt")
    path.unlink() if change == "missing" else path.touch()
    with pytest.raises(CheckpointError, match=path.name):
        _load(checkpoint)


def test_a_damaged_state_is_not_read_alone_either(tmp_path):
    checkpoint = _save(tmp_path, 7)
    (checkpoint / "state.json").write_text(json.dumps({"iteration": 8}))
    with pytest.raises(CheckpointError, match="damaged"):
        load_state(checkpoint)


def test_another_number_of_ranks_is_refused_with_what_to_do(tmp_path):
    checkpoint = _save(tmp_path, 7)
    with pytest.raises(CheckpointError, match=r"set trainer\.num_ranks to 1"):
        _load(checkpoint, Ranks(0, 2))


def test_a_folder_without_manifest_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        load_state(tmp_path)


_KILLED_AT = {
    "while files are written": (Path, "write_text"),
    "while files are flushed": (os, "fsync"),
    "before the rename": (Path, "rename"),
    "before an old one is deleted": (shutil, "rmtree"),
}


@pytest.mark.parametrize("moment", _KILLED_AT)
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path, moment):
    _save(tmp_path, 1)
    child = os.fork()
    if child == 0:
        setattr(*_KILLED_AT[moment], lambda *_args, **_options: os.kill(os.getpid(), signal.SIGKILL))
        try:
            _save(tmp_path, 2, keep=1)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    policy, state = _load(checkpoints(tmp_path)[-1])
    assert state == {"iteration": policy.value}
    assert policy.value == (2 if moment == "before an old one is deleted" else 1)

    _save(tmp_path, 3, keep=1)
    assert _load(checkpoints(tmp_path)[-1])[0].value == 3
    assert [path.name for path in tmp_path.iterdir()] == ["attempt-0001-iteration-000003"]
