"""Tests of trainer_svc.reward_pool and trainer_svc.reward_worker: whatever a function does costs its sample at most."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import psutil
import pytest

from trainer_svc.reward_input import RewardError
from trainer_svc.reward_pool import PoolLimits, RewardPool

WAIT_S = 30.0
MODULE = """
import os, signal, subprocess, sys, time, threading

held = []

def score(response):
    return float(eval(response))

def _fork_and_return():
    os.fork()
    return 1.0

def _leave_daemons(folder):
    # A child in a session of its own, and one whose parent has ended.
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    subprocess.run(["sh", "-c", "setsid sleep 1001 &"], stdout=subprocess.DEVNULL)
    return 1.0

def _take(gib):
    held.append(bytearray(int(gib * 2**30)))
    return 1.0

def _meet(folder, number):
    open(f"{folder}/{number}", "w").close()
    while len(os.listdir(folder)) < 2:
        time.sleep(0.01)
    return 1.0

def _hang(pid_file):
    with open(pid_file + ".new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(pid_file + ".new", pid_file)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RewardPool]]:
    """Starts pools that call `score` of a module of MODULE's text; they end with the test."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wild_rewards.py").write_text(MODULE)
    pools: list[RewardPool] = []

    def start(**limits: Any) -> RewardPool:
        settings = {"num_workers": 1, "timeout_s": WAIT_S, "memory_bytes": 2**30}
        pools.append(RewardPool(["wild_rewards:score"], PoolLimits(**{**settings, **limits})))
        return pools[-1]

    yield start
    for pool in pools:
        pool.close()
    assert not [process for process in psutil.Process().children(recursive=True) if _is_of_a_reward(process)]


def _is_of_a_reward(process: psutil.Process) -> bool:
    try:
        return any(word in " ".join(process.cmdline()) for word in ("reward_worker", "sleep 100"))
    except psutil.NoSuchProcess:
        return False


def sleeping() -> list[psutil.Process]:
    return [process for process in psutil.Process().children(recursive=True) if process.name() == "sleep"]


def score(pool: RewardPool, code: str) -> float:
    return pool.submit("wild_rewards:score", {"response": code}).result(WAIT_S)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("os._exit(7)", r"ended its process \(exit code 7\)"),
        ("os.kill(os.getpid(), signal.SIGKILL)", r"ended its process \(SIGKILL\)"),
        ("os.killpg(0, signal.SIGTERM)", r"ended its process \(SIGTERM\)"),
        ("_take(3)", r"took more memory than reward\.memory_gib"),
        ("os.closerange(3, 100)", "ended its process"),
    ],
)
def test_a_process_that_a_function_ends_costs_its_sample_and_is_replaced(
    start: Callable[..., RewardPool], code: str, message: str
) -> None:
    pool = start()
    with pytest.raises(RewardError, match=message):
        score(pool, code)
    assert score(pool, "0.5") == 0.5


def test_prints_forks_and_readings_are_no_replies(
    start: Callable[..., RewardPool], capfd: pytest.CaptureFixture[str]
) -> None:
    pool = start()
    assert score(pool, "print('{\"value\": 3}') or 1") == 1.0
    assert score(pool, "os.system('echo said') + 1") == 1.0
    assert score(pool, "len(sys.stdin.read())") == 0.0
    assert [score(pool, "_fork_and_return()") for _ in range(3)] == [1.0] * 3
    assert score(pool, "0.25") == 0.25
    assert "said" in capfd.readouterr().err


def test_what_a_function_leaves_behind_ends_with_its_process(start: Callable[..., RewardPool], tmp_path: Path) -> None:
    pool = start()
    assert score(pool, f"_leave_daemons({str(tmp_path)!r})") == 1.0
    while len(sleeping()) < 2:
        threading.Event().wait(0.02)  # the shell may not have come so far
    with pytest.raises(RewardError):
        score(pool, "os._exit(0)")
    assert sleeping() == []


def test_a_function_that_hangs_costs_its_sample(start: Callable[..., RewardPool]) -> None:
    pool = start(timeout_s=1.0)
    with pytest.raises(RewardError, match=r"has not answered within 1 s \(reward\.timeout_s\)"):
        score(pool, "signal.signal(signal.SIGTERM, signal.SIG_IGN) or time.sleep(1000)")


def test_a_process_that_ended_between_two_calls_costs_no_sample(start: Callable[..., RewardPool]) -> None:
    pool = start()
    worker = psutil.Process(int(score(pool, "os.getpid()")))
    worker.kill()
    psutil.wait_procs([worker], timeout=WAIT_S)
    guard = pool._idle[0]._process
    guard.wait(WAIT_S)
    assert score(pool, "0.5") == 0.5


def test_calls_run_beside_each_other(start: Callable[..., RewardPool], tmp_path: Path) -> None:
    pool = start(num_workers=2)
    folder = tmp_path / "meeting"
    folder.mkdir()
    calls = [pool.submit("wild_rewards:score", {"response": f"_meet({str(folder)!r}, {n})"}) for n in range(2)]
    assert [call.result(WAIT_S) for call in calls] == [1.0, 1.0]


def test_closing_cancels_what_is_under_way(start: Callable[..., RewardPool], tmp_path: Path) -> None:
    pool = start()
    there = threading.Event()
    calls = [pool.submit("wild_rewards:score", {"response": "time.sleep(1000)"}) for _ in range(2)]
    calls[1].add_done_callback(lambda _: there.set())
    pool.close()
    assert there.wait(WAIT_S)
    for call in calls:
        with pytest.raises(CancelledError):
            call.result(WAIT_S)


def test_nothing_outlives_a_trainer_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "wild_rewards.py").write_text(MODULE)
    pid_file = tmp_path / "pid"
    code = (
        "from trainer_svc.reward_pool import PoolLimits, RewardPool\n"
        "pool = RewardPool(['wild_rewards:score'], PoolLimits(1, 1000.0, 2**30))\n"
        f"pool.submit('wild_rewards:score', {{'response': \"_hang({str(pid_file)!r})\"}}).result()\n"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    try:
        while not pid_file.exists():
            assert trainer.poll() is None
            threading.Event().wait(0.05)
        worker = psutil.Process(int(pid_file.read_text()))
        guard = worker.parent()
        assert guard is not None
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    assert psutil.wait_procs([worker, guard], timeout=WAIT_S)[1] == []
