"""Processes that end with their parent, and processes told apart."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl import lifetime
from streamrl.lifetime import ProcessIdentity

# Starts a child that `spawn` ties to it, tells the child's id, and waits.
_STARTER = """
import sys, time
from streamrl import lifetime
child = lifetime.spawn([sys.executable, "-c", sys.argv[1]], log=__import__("pathlib").Path(sys.argv[2]))
print(child.pid, flush=True)
time.sleep(1000)
"""
_ORDERLY = """
import threading
from streamrl import lifetime
stop = threading.Event()
lifetime.on_termination(stop.set, grace_s=1000)
print("ready", flush=True)
while not stop.wait(0.05): pass
print("ended in order", flush=True)
"""
_DEAF = """
import signal, time
from streamrl import lifetime
lifetime.ORPHAN_GRACE_S = 0.2
lifetime.on_termination(lambda: None, grace_s=1000)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("ready", flush=True)
time.sleep(1000)
"""


def _kill_starter_of(program: str, log: Path, *, while_stopped: bool = False) -> bool:
    """Whether the child ends after its parent was killed.

    Args:
        while_stopped: the child is stopped (SIGSTOP) when its parent is killed.
    """
    with subprocess.Popen(
        [sys.executable, "-c", _STARTER, program, str(log)], stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        child = int(starter.stdout.readline())
        child_fd = os.pidfd_open(child)
        try:
            while "ready" not in log.read_text():
                assert not lifetime.wait_ended(child_fd, timeout_s=0.05), log.read_text()
            if while_stopped:
                os.kill(child, signal.SIGSTOP)
            starter.send_signal(signal.SIGKILL)
            return lifetime.wait_ended(child_fd, timeout_s=20)
        finally:
            os.close(child_fd)


def test_a_child_ends_in_order_when_its_parent_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert _kill_starter_of(_ORDERLY, log)
    assert "ended in order" in log.read_text()


def test_a_child_that_is_stopped_ends_in_order_when_its_parent_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert _kill_starter_of(_ORDERLY, log, while_stopped=True)
    assert "ended in order" in log.read_text()


def test_a_child_that_handles_no_signal_is_ended_hard_when_its_parent_is_killed(tmp_path: Path) -> None:
    assert _kill_starter_of(_DEAF, tmp_path / "log")


def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    program = "from streamrl.lifetime import die_with_parent; die_with_parent(1 << 22); print('still here')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


def test_output_goes_to_the_log_and_the_child_has_a_session_of_its_own(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "child.log"
    program = "import os, sys; print(os.getsid(0) == os.getpid(), flush=True); sys.stderr.write('error')"
    assert lifetime.spawn([sys.executable, "-c", program], log=log).wait(20) == 0
    assert log.read_text() == "True\nerror"


def test_a_second_signal_ends_a_process_at_once() -> None:
    program = (
        "import time; from streamrl import lifetime\n"
        "lifetime.on_termination(lambda: print('asked', flush=True), grace_s=1000)\n"
        "print('ready', flush=True); time.sleep(1000); time.sleep(1000)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for expected in ("ready\n", "asked\n"):
            assert process.stdout.readline() == expected
            process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 130


def test_an_identity_is_of_one_life_of_a_process_id() -> None:
    me = ProcessIdentity.of(os.getpid())
    assert me is not None and me.is_alive()
    other_life = ProcessIdentity(me.pid, me.start_ticks + 1)
    assert not other_life.is_alive()
    assert not other_life.send(signal.SIGKILL)


@pytest.mark.parametrize("reaped", [False, True])
def test_a_process_that_has_ended_is_not_alive(reaped: bool) -> None:
    process = subprocess.Popen(["sleep", "1000"])
    identity = ProcessIdentity.of(process.pid)
    assert identity is not None and identity.send(signal.SIGKILL)
    pidfd = os.pidfd_open(process.pid)
    assert lifetime.wait_ended(pidfd, timeout_s=20)
    os.close(pidfd)
    if reaped:
        process.wait()
    assert not identity.is_alive()
    assert not identity.send(signal.SIGKILL)
    process.wait()


# Its interpreter cannot be taken down: a thread that is no daemon holds it, and code below Python might as well.
_ENDLESS_EXIT = """
import atexit, ctypes, sys
from streamrl import lifetime
lifetime.on_termination(lambda: None, grace_s=1000)
def hold():
    print("ready", flush=True)
    ctypes.PyDLL(None).sleep(1000)  # holds the lock of the interpreter: no other thread runs
atexit.register(hold)
lifetime.bound_exit(LIMIT)
"""


def test_a_process_that_is_taken_down_dies_with_its_parent(tmp_path: Path) -> None:
    assert _kill_starter_of(_ENDLESS_EXIT.replace("LIMIT", "1000"), tmp_path / "log")


def test_a_process_that_cannot_be_taken_down_is_ended_by_the_kernel() -> None:
    process = subprocess.run([sys.executable, "-c", _ENDLESS_EXIT.replace("LIMIT", "1")], timeout=60, check=False)
    assert process.returncode == -signal.SIGALRM


def test_a_process_that_was_bounded_keeps_its_exit_code_whatever_is_sent_to_it() -> None:
    program = (
        "import os, signal, sys; from streamrl import lifetime\n"
        "lifetime.bound_exit(1000); os.kill(os.getpid(), signal.SIGTERM); sys.exit(7)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 7
