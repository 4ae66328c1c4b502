"""Processes that end with their parent, orderly ends on SIGTERM, and processes told apart from others with their id.

Linux sends a chosen signal to a process when the thread that started it ends (prctl PR_SET_PDEATHSIG). It survives
exec but not fork: every process sets its own.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from streamrl import tied_exec

ORPHAN_GRACE_S = 6.0
"""A process whose parent died has this long for an orderly end, whatever it was promised for other ends."""

_watched_parent: int | None = None
"""Process whose death `on_termination` waits for."""

_PR_SET_PDEATHSIG = 1
_PR_GET_PDEATHSIG = 2
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent_pid: int | None = None, with_signal: signal.Signals = signal.SIGKILL) -> None:
    """Asks the kernel to signal this process when its parent ends.

    Args:
        parent_pid: the parent as the caller knows it; when it is gone already, the signal is sent at once.
        with_signal: SIGKILL for processes that have nothing to save, SIGTERM for those that end in order.

    Raises:
        OSError: the kernel refused.
    """
    if _LIBC.prctl(_PR_SET_PDEATHSIG, int(with_signal), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), with_signal)


def spawn(
    command: Sequence[str],
    *,
    log: Path | None = None,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    with_signal: signal.Signals = signal.SIGTERM,
    piped: bool = False,
) -> "subprocess.Popen[bytes]":
    """Starts a child that is signalled when this process ends, in a session of its own.

    A session of its own keeps a terminal's Ctrl-C from reaching it: its end is this process's decision. Call it from
    the main thread: the signal is tied to the calling thread's life.

    Args:
        log: file that its standard output and error are appended to; None: inherited.
        env: whole environment; None: inherited.
        piped: its standard input and output are pipes to this process.
    """
    output: IO[bytes] | None = None
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        output = log.open("ab")
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", tied_exec.__file__, str(os.getpid()), str(int(with_signal)), *command],
            stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
            stdout=subprocess.PIPE if piped else output,
            stderr=output,
            env=env,
            cwd=cwd,
            start_new_session=True,
        )
    finally:
        if output is not None:
            output.close()


def on_termination(stop: Callable[[], None], *, grace_s: float) -> None:
    """Calls `stop`, from any thread, on the first SIGTERM or SIGINT; ends the process hard when it still lives
    `grace_s` later or when a second signal comes. Call it from the main thread.

    In a process that `spawn` started, the parent's death is such a signal too, and the process ends hard
    `ORPHAN_GRACE_S` after it: nobody is left who would end it. A thread watches the parent, for a signal's handler
    would wait for a main thread that is busy in native code; and from now on the parent-death signal is SIGCONT,
    because a process that is stopped (SIGSTOP, a debugger) would keep SIGTERM pending and outlive its run.
    """
    asked = False

    def ask() -> None:
        nonlocal asked
        asked = True
        _exit_after(grace_s)
        stop()

    global _watched_parent

    def handle(_signal: int, _frame: object) -> None:
        if asked:
            os._exit(128 + signal.SIGINT)
        ask()

    def end_after_parent(parent_fd: int | None) -> None:
        if parent_fd is not None:
            wait_ended(parent_fd)
        _exit_after(ORPHAN_GRACE_S)
        if not asked:
            ask()

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
    if _parent_death_signal() == signal.SIGTERM:
        _watched_parent = os.getppid()
        parent_fd = _open_process(_watched_parent)
        threading.Thread(target=end_after_parent, args=(parent_fd,), name="parent-watch", daemon=True).start()
        # Only now: a parent that died before its descriptor was open has sent SIGTERM.
        die_with_parent(with_signal=signal.SIGCONT)


def bound_exit(limit_s: int) -> None:
    """For a process whose work is done, before its interpreter is taken down: the kernel ends it when that takes longer
    than `limit_s`, and, where `on_termination` watched its parent, as soon as that dies. No other signal changes its
    exit code any more.

    Threads that are no daemons can hold up that end for ever, and so can the libraries with code of their own that are
    taken down in it. Neither signal handlers nor the threads of `on_termination` run by then: only what the kernel does
    by itself still holds. The end itself stays an ordinary one, unlike with os._exit, because functions of the user's
    (rewards) run in our processes: what they have left in open files, or to functions of atexit, is to be kept.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.alarm(limit_s)
    if _watched_parent is not None:
        die_with_parent(_watched_parent)


def _exit_after(delay_s: float) -> None:
    timer = threading.Timer(delay_s, os._exit, args=(1,))
    timer.daemon = True
    timer.start()


def _parent_death_signal() -> int:
    number = ctypes.c_int()
    _LIBC.prctl(_PR_GET_PDEATHSIG, ctypes.byref(number), 0, 0, 0)
    return number.value


def _open_process(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def wait_ended(pidfd: int, timeout_s: float | None = None) -> bool:
    """Waits, without polling, for a process that need not be a child.

    Args:
        pidfd: from os.pidfd_open.
        timeout_s: None: as long as it takes.

    Returns:
        Whether it has ended.
    """
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(None if timeout_s is None else timeout_s * 1000))


@dataclass(frozen=True)
class ProcessIdentity:
    """A process that a reused process id is not mistaken for."""

    pid: int
    start_ticks: int
    """When it started, in clock ticks since the machine did (field 22 of /proc/PID/stat)."""

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity | None":
        """The process that has this id now; None when there is none, or only its unread exit code."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return None
        # The program's name, in parentheses, may hold spaces and parentheses of its own.
        state, *fields = text.rpartition(")")[2].split()
        return None if state in "ZX" else cls(pid, int(fields[18]))

    def is_alive(self) -> bool:
        return self.of(self.pid) == self

    def send(self, number: signal.Signals) -> bool:
        """Signals the process, never another one that has its id by now.

        Returns:
            Whether it was there.
        """
        pidfd = _open_process(self.pid) if self.is_alive() else None
        if pidfd is None:
            return False
        try:
            # The descriptor holds on to whatever process had the id when it was opened.
            if not self.is_alive():
                return False
            signal.pidfd_send_signal(pidfd, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(pidfd)
        return True
