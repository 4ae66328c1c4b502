"""The owner's side of a member process: starts it, asks it with a deadline, and kills it when that passes."""

import contextlib
import json
import logging
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from signal import SIGKILL
from typing import IO, Any

from streamrl.errors import FabricError
from streamrl.fabric.regions import Region
from streamrl.lifetime import spawn

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "streamrl.fabric.member_process")
MEET_S = 30.0
"""A group whose members have not all joined by then is given up."""
MAX_FAILURES = 3
"""After so many in a row an end takes the ordinary way for good."""
_MINT_S = 10.0
_MOVE_S = 10.0
_SLOWEST_BYTES_PER_S = 200e6
"""A broadcast slower than this is given up: the ordinary way is faster."""


class FabricMember:
    """One process after another. `start` is for the main thread, questions for one thread at a time, `kill` for any."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        """
        Args:
            command: tests have a network of their own.
        """
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._ready = threading.Event()
        self._refused = False
        self._group = b""

    @property
    def group(self) -> bytes:
        """The unique id of the group that the process is in; empty: none."""
        return self._group

    @property
    def ready(self) -> bool:
        """Whether there is a process that can join a group."""
        return self._ready.is_set()

    def start(self) -> None:
        """Starts a process where none is, and returns at once. One that found no GPU is not followed by another."""
        if self._refused or (self._process is not None and self._process.poll() is None):
            return
        self.kill()
        process, answers, ready = spawn(self._command, with_signal=SIGKILL, piped=True), self._answers, self._ready
        self._process = process
        # It ends with the process, at the latest with this one.
        threading.Thread(target=self._read, args=(process, answers, ready), name="fabric-member", daemon=True).start()

    def mint(self) -> bytes:
        """The unique id of a new group.

        Raises:
            FabricError: as from every question; the process is gone then.
        """
        return bytes.fromhex(self._ask({"do": "mint"}, _MINT_S)["unique_id"])

    def join(self, unique_id: bytes, rank: int, world_size: int) -> None:
        """Joins a group, or stays in it. Returns when all have."""
        if unique_id != self._group:
            self._ask({"do": "join", "unique_id": unique_id.hex(), "rank": rank, "world_size": world_size}, MEET_S)
            self._group = unique_id

    def move(self, path: str, regions: Sequence[Region]) -> None:
        """Sends these parts of a file as rank 0, or fills them as another."""
        num_bytes = sum(region.num_bytes for region in regions)
        limit_s = _MOVE_S + num_bytes / _SLOWEST_BYTES_PER_S
        moved = self._ask({"do": "move", "path": path, "regions": regions}, limit_s)["moved"]
        if moved != num_bytes:
            raise FabricError(f"{moved} bytes were moved: expected {num_bytes}")

    def kill(self) -> None:
        """Ends the process, whatever it does; who is asking it gets an error once it has ended."""
        process, self._process = self._process, None
        self._answers, self._ready, self._group = queue.SimpleQueue(), threading.Event(), b""
        if process is not None:
            process.kill()

    def _ask(self, question: dict[str, Any], limit_s: float) -> dict[str, Any]:
        process, answers = self._process, self._answers
        if process is None or process.stdin is None or not self.ready:
            raise FabricError("there is no member process")
        doing = question["do"]
        asked = time.monotonic()
        try:
            _write(process, process.stdin, json.dumps(question).encode() + b"\n", limit_s)
            answer = answers.get(timeout=limit_s)
        except queue.Empty:
            _end(process)
            raise FabricError(f"asked to {doing}, the member process did not in {limit_s:g} s") from None
        except (OSError, ValueError):  # it has ended, or its pipes are being closed
            answer = None
        if answer is None or "error" in answer:
            _end(process)
            why = "ended" if answer is None else f"failed ({answer['error']})"
            raise FabricError(f"asked to {doing}, the member process {why} after {time.monotonic() - asked:.1f} s")
        return answer

    def _read(
        self,
        process: "subprocess.Popen[bytes]",
        answers: "queue.SimpleQueue[dict[str, Any] | None]",
        ready: threading.Event,
    ) -> None:
        """Until the process has ended."""
        assert process.stdout is not None
        why = "the member process ended before it was ready"
        # Questions that were not read any more are no loss.
        with contextlib.suppress(BrokenPipeError), process:
            for line in process.stdout:
                answer = json.loads(line)
                if "ready" in answer:
                    ready.set()
                elif ready.is_set():
                    answers.put(answer)
                else:
                    why = answer["error"]
        if self._process is process:
            self._group = b""
            if not ready.is_set():
                self._refused = True
                logger.warning("no weights by NCCL, all are fetched: %s", why)
        ready.clear()
        answers.put(None)


def _write(process: "subprocess.Popen[bytes]", pipe: IO[bytes], question: bytes, limit_s: float) -> None:
    """Ends a process that does not read: it would hold up whoever writes more than the pipe takes."""
    overdue = threading.Timer(limit_s, process.kill)
    overdue.start()
    try:
        pipe.write(question)
        pipe.flush()
    finally:
        overdue.cancel()


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
