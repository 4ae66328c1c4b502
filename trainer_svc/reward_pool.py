"""The processes that call reward functions, as the trainer sees them: started when needed, replaced when they fail.

What runs in them is trainer_svc/reward_worker.py. Each has one call at a time; calls that find all of them busy wait.
"""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_svc.reward_input import RewardError

logger = logging.getLogger(__name__)

_START_S = 120.0
"""A user's modules may import much."""
_END_S = 10.0
# A process scores one answer at a time. With a thread a core each would reserve much of its memory, too.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# The root that `-m` needs to find the worker, wherever the trainer was started.
_ROOT = Path(__file__).resolve().parent.parent


class RewardCpuLimitError(RewardError):
    """The function took more processor time than it is given."""


@dataclass(frozen=True)
class PoolLimits:
    """Of the processes."""

    num_workers: int
    timeout_s: float
    """Wall time of one call."""
    memory_bytes: int
    """Data of one process."""


class RewardPool:
    """Calls functions in at most `num_workers` processes at once. Thread-safe; `close` it."""

    def __init__(self, names: Sequence[str], limits: PoolLimits) -> None:
        """Starts the first process.

        Raises:
            ValueError: a function cannot be found or called, or importing it ended or held up the process.
        """
        self._names = list(names)
        self._limits = limits
        self._lock = threading.Lock()
        self._closed = False
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        # Threads are made when all others are busy, and a process when all others are: a run that scores little has
        # one of each.
        self._executor = ThreadPoolExecutor(limits.num_workers, thread_name_prefix="reward")
        first = self._start()
        self.arguments: Mapping[str, tuple[str, ...]] = first.arguments
        """Of each function, those that it takes."""
        self._idle.append(first)

    def submit(self, name: str, arguments: Mapping[str, Any], *, cpu_limit_s: float | None = None) -> "Future[float]":
        """Calls a function as soon as a process is free. The result raises RewardError when there is none."""
        return self._executor.submit(self._call, name, arguments, cpu_limit_s)

    def close(self) -> None:
        """Ends all processes with everything that they have started; calls under way are cancelled."""
        with self._lock:
            self._closed = True
            workers = list(self._all)
        for worker in workers:
            worker.ask_to_end()
        self._executor.shutdown(cancel_futures=True)
        for worker in workers:
            worker.end()

    def _call(self, name: str, arguments: Mapping[str, Any], cpu_limit_s: float | None) -> float:
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        if worker is not None and worker.is_ending():
            # Of something that it did after its last answer: not this one's fault.
            self._drop(worker)
            worker = None
        try:
            worker = worker or self._start()
        except ValueError as error:  # it could be started before
            raise RewardError(f"reward {name}: no process could be started: {error}") from error
        request = {"function": name, "arguments": arguments, "cpu_limit_s": cpu_limit_s}
        try:
            reply = worker.ask(request, self._limits.timeout_s)
        except TimeoutError as error:
            self._drop(worker)
            raise RewardError(
                f"reward {name} has not answered within {self._limits.timeout_s:g} s (reward.timeout_s)"
            ) from error
        except OSError as error:
            code = self._drop(worker)
            if code == 128 + signal.SIGPROF and cpu_limit_s is not None:
                raise RewardCpuLimitError(f"reward {name} took {cpu_limit_s:g} s of processor time") from error
            raise RewardError(f"reward {name} ended its process ({_described(code)})") from error
        if reply.get("broken"):
            self._drop(worker)
        else:
            with self._lock:
                self._idle.append(worker)
        if "error" in reply:
            raise RewardError(f"reward {name} {reply['error']}")
        return float(reply["value"])

    def _start(self) -> "_Worker":
        with self._lock:
            if self._closed:
                raise CancelledError
            worker = _Worker()
            self._all.add(worker)
        try:
            worker.load(self._names, self._limits.memory_bytes)
        except ValueError:
            self._drop(worker)
            raise
        except TimeoutError as error:
            self._drop(worker)
            raise ValueError(
                f"reward.functions: importing {', '.join(self._names)} has not ended within {_START_S:g} s"
            ) from error
        except OSError as error:
            code = self._drop(worker)
            raise ValueError(
                f"reward.functions: importing {', '.join(self._names)} ended the process ({_described(code)})"
            ) from error
        return worker

    def _drop(self, worker: "_Worker") -> int:
        """Ends a process that is of no more use; returns its exit code.

        Raises:
            CancelledError: it ended because the pool is closed.
        """
        code = worker.end()
        with self._lock:
            self._all.discard(worker)
            if self._closed:
                raise CancelledError
        return code


class _Worker:
    """One process, and its end of the socket."""

    def __init__(self) -> None:
        self.arguments: Mapping[str, tuple[str, ...]] = {}
        self._received = b""
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trainer_svc.reward_worker", str(os.getpid()), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=(theirs.fileno(),),
                env={**_ONE_THREAD, **os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )

    def load(self, names: Sequence[str], memory_bytes: int) -> None:
        """
        Raises:
            ValueError: a function cannot be used.
            OSError: as `ask`.
        """
        # An empty entry is the current folder, and `-m` has put it there for the worker too.
        request = {"path": sys.path, "functions": names, "memory_bytes": memory_bytes}
        reply = self.ask(request, _START_S)
        if "error" in reply:
            raise ValueError(reply["error"])
        self.arguments = {name: tuple(arguments) for name, arguments in reply["arguments"].items()}

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Sends a request and waits for its reply.

        Raises:
            TimeoutError: there is none.
            OSError: the process has ended.
        """
        deadline_s = time.monotonic() + timeout_s
        self._socket.settimeout(timeout_s)
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        while b"\n" not in self._received:
            self._socket.settimeout(max(1e-3, deadline_s - time.monotonic()))
            received = self._socket.recv(65536)
            if not received:
                raise ConnectionResetError
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def ask_to_end(self) -> None:
        """Ends it soon, whatever it does."""
        self._process.terminate()

    def end(self) -> int:
        """Ends it and waits for that; returns the exit code of the process that called the functions."""
        try:
            # One that has ended by itself is given the time to say how.
            if self._socket.fileno() >= 0 and not self.is_ending():
                self._process.terminate()
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            logger.warning("a reward process did not end within %.0f s: killed", _END_S)
            self._process.kill()
            self._process.wait()
        finally:
            self._socket.close()
        return self._process.returncode

    def is_ending(self) -> bool:
        """Whether its end of the socket is closed."""
        try:
            self._socket.settimeout(0)
            return self._socket.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True


def _described(code: int) -> str:
    number = code - 128
    return signal.Signals(number).name if number in list(signal.Signals) else f"exit code {code}"
