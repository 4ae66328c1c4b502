"""Processes that end with their parent, and orderly ends on SIGTERM.

Linux sends a chosen signal to a process when the thread that started it ends (prctl PR_SET_PDEATHSIG). It survives
exec but not fork: every process sets its own.
"""

import ctypes
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

_PR_SET_PDEATHSIG = 1
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
) -> "subprocess.Popen[bytes]":
    """Starts a child that is signalled when this process ends, in a session of its own.

    A session of its own keeps a terminal's Ctrl-C from reaching it: its end is this process's decision. Call it from
    the main thread: the signal is tied to the calling thread's life.

    Args:
        log: file that its standard output and error are appended to; None: inherited.
        env: whole environment; None: inherited.
    """
    parent_pid = os.getpid()
    output: IO[bytes] | None = None
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        output = log.open("ab")
    try:
        return subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=env,
            cwd=cwd,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent_pid, with_signal),
        )
    finally:
        if output is not None:
            output.close()


def on_termination(stop: Callable[[], None], *, grace_s: float) -> None:
    """Calls `stop` on the first SIGTERM or SIGINT; ends the process hard when it still lives `grace_s` later or when a
    second signal comes. Call it from the main thread."""
    asked = False

    def handle(_signal: int, _frame: object) -> None:
        nonlocal asked
        if asked:
            os._exit(128 + signal.SIGINT)
        asked = True
        timer = threading.Timer(grace_s, os._exit, args=(1,))
        timer.daemon = True
        timer.start()
        stop()

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
