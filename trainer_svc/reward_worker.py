"""A process that calls reward functions, so that whatever they do costs a sample at most and never the run.

    python -m trainer_svc.reward_worker TRAINER_PID SOCKET

Two processes, in fact. The first is a guard: it runs nobody's code, and when the worker ends or the trainer does it
ends whatever the functions have left behind, daemons included. The second, the worker, answers JSON lines on the
socket, one call at a time. It has a limit of memory, its standard input is empty, and what functions print goes to
the trainer's log. This protects from accidents, not from malice: a function may do what the trainer's user may.

    → {"path": [...], "functions": [name, ...], "memory_bytes": n}
    ← {"arguments": {name: [argument, ...]}}                or {"error": "..."}, and it ends
    → {"function": name, "arguments": {...}, "cpu_limit_s": n or null}
    ← {"value": 0.5}          or {"error": "...", "broken": whether the process must be replaced}

The trainer's side is trainer_svc/reward_pool.py.
"""

import contextlib
import ctypes
import json
import math
import numbers
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from streamrl.lifetime import die_with_parent
from trainer_svc.reward_input import LARGEST_REWARD

_PR_SET_CHILD_SUBREAPER = 36
_LONGEST_ERROR = 1000


def main() -> None:
    trainer_pid, descriptor = int(sys.argv[1]), int(sys.argv[2])
    trainer = os.pidfd_open(trainer_pid)
    if os.getppid() != trainer_pid:
        return  # it has ended
    # Orphans of the worker become children of the guard.
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    # Before the fork, so that no SIGTERM finds the guard without it; it raises where the guard waits.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    guard_pid = os.getpid()
    worker_pid = os.fork()
    if worker_pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent(guard_pid)
        os.close(trainer)
        _work(socket.socket(fileno=descriptor))
    os.close(descriptor)
    sys.exit(_guard(trainer, worker_pid))


def _guard(trainer: int, worker_pid: int) -> int:
    """Waits for the end of the worker or the trainer, then ends what is left.

    Returns:
        The worker's exit code; 128 and a signal's number when that ended it.
    """
    poller = select.poll()
    for descriptor in (trainer, os.pidfd_open(worker_pid)):
        poller.register(descriptor, select.POLLIN)
    try:
        poller.poll()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.kill(worker_pid, signal.SIGKILL)  # not waited for yet: the number is still its own
        code = os.waitstatus_to_exitcode(os.waitpid(worker_pid, 0)[1])
        _end_descendants()
    return 128 - code if code < 0 else code


def _end_descendants() -> None:
    """Kills the children, who leave theirs to this process, until there are none."""
    while True:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if ended == 0:
            import psutil  # only where a function left something behind

            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            os.waitpid(-1, 0)


def _work(connection: socket.socket) -> NoReturn:
    """Serves until the trainer ends it. Never returns."""
    os.setsid()  # a function that signals its group means itself, not the guard
    pid = os.getpid()
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.dup2(2, 1)
    requests = connection.makefile("r", encoding="utf-8")
    functions: dict[str, Callable[..., Any]] = {}
    for line in requests:
        request = json.loads(line)
        if functions:
            reply = _call(functions[request["function"]], request)
        else:
            reply, functions = _load(request)
        if os.getpid() != pid:
            os._exit(0)  # a function has forked, and this is the child, which has come back as well
        connection.sendall(json.dumps(reply).encode() + b"\n")
    os._exit(0)


def _load(request: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Callable[..., Any]]]:
    memory_bytes = request["memory_bytes"]
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Where the machine runs out of memory all the same, this process is the one to go.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    sys.path[:] = request["path"]
    try:
        # Here, as it is imported from where the trainer finds it.
        from trainer_svc.reward_lookup import accepted_arguments, find

        functions = {name: find(name) for name in request["functions"]}
        return {"arguments": {name: accepted_arguments(call) for name, call in functions.items()}}, functions
    except (ValueError, MemoryError) as error:
        return {"error": _shown(error)}, {}


def _call(function: Callable[..., Any], request: Mapping[str, Any]) -> dict[str, Any]:
    # Nobody handles SIGPROF: it ends the process.
    signal.setitimer(signal.ITIMER_PROF, request["cpu_limit_s"] or 0.0)
    try:
        value = function(**request["arguments"])
        number = float(value) if isinstance(value, numbers.Real) else math.nan
    except MemoryError:
        return {"error": "took more memory than reward.memory_gib", "broken": True}
    except BaseException as error:  # a user's code may raise anything; the trainer is told
        return {"error": f"raised {_shown(error)}", "broken": False}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if not abs(number) <= LARGEST_REWARD:
        expected = f"a number from -{LARGEST_REWARD:g} to {LARGEST_REWARD:g}"
        return {"error": f"returned {value!r:.{_LONGEST_ERROR}}, expected {expected}", "broken": False}
    return {"value": number}


def _shown(error: BaseException) -> str:
    text = str(error)[:_LONGEST_ERROR]
    # What trainer_svc/reward_lookup.py says is for people as it is.
    return text if text.startswith("reward.functions") else f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    main()
