"""Checks mathematical answers with math-verify in a process of its own.

math-verify limits its time by signals, which works on a main thread only and cannot interrupt one long operation on
huge integers (9^9^9^9). Here the whole process has so many seconds of processor time an answer; the kernel ends it when
they are over, and a new one takes its place. Processor time and not wall time: how busy the machine is does not decide
whether an answer is right.

Run as `python -m trainer_svc.math_verifier PARENT_PID CPU_SECONDS`, it answers JSON lines on its standard input.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from streamrl.errors import StreamRLError
from streamrl.lifetime import die_with_parent

logger = logging.getLogger(__name__)

CPU_SECONDS = 5.0
# The root that `-m` needs to find this module, wherever the trainer was started.
_ROOT = Path(__file__).resolve().parent.parent


class MathVerifier:
    """The process, started at once and again after each time that it ended. Safe to call from several threads."""

    def __init__(self, cpu_seconds: float = CPU_SECONDS) -> None:
        self._cpu_seconds = cpu_seconds
        self._lock = threading.Lock()
        self._process = self._start()

    def verify(self, *, response: str, answer: str) -> bool:
        """Whether the answer is mathematically the same as the key. One that cannot be checked in time is not.

        Raises:
            ValueError: the key is not mathematics.
            StreamRLError: the process ended without a reason of ours, twice.
        """
        with self._lock:
            for _ in range(2):
                reply = self._ask(json.dumps({"response": response, "answer": answer}))
                if reply:
                    verdict = json.loads(reply)
                    if "error" in verdict:
                        raise ValueError(f"math_verify: {verdict['error']}")
                    return bool(verdict["right"])
                self._process.communicate()
                status = self._process.returncode
                self._process = self._start()
                if status == -signal.SIGPROF:
                    logger.warning(
                        "math_verify gave up after %.0f s of processor time on %.200r", self._cpu_seconds, response
                    )
                    return False
        raise StreamRLError(f"the math-verify process ended twice in a row, status {status}: see its errors above")

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            self._process.kill()
            self._process.communicate()

    def _ask(self, line: str) -> str:
        """The reply line; empty when the process has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return ""
        return self._process.stdout.readline()

    def _start(self) -> "subprocess.Popen[str]":
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        return subprocess.Popen(
            [sys.executable, "-m", "trainer_svc.math_verifier", str(os.getpid()), str(self._cpu_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )


def _is_right(response: str, answer: str) -> bool:
    from math_verify import parse, verify

    key_text = answer.rsplit("####", 1)[-1].strip()
    key = parse(f"${key_text}$", parsing_timeout=None) or parse(key_text, parsing_timeout=None)
    if not key:
        raise ValueError(f"the key {answer!r} is not mathematics")
    return bool(verify(key, parse(response, parsing_timeout=None), timeout_seconds=None))


def _serve(parent_pid: int, cpu_seconds: float) -> None:
    die_with_parent(parent_pid)
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own limits are off
    import math_verify  # noqa: F401  (imported before the first limit runs)

    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # nobody handles SIGPROF: it ends the process
        try:
            reply: dict[str, object] = {"right": _is_right(request["response"], request["answer"])}
        except ValueError as error:
            reply = {"error": str(error)}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve(int(sys.argv[1]), float(sys.argv[2]))
