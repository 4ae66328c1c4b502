"""The scheduler's side of the ranker's process: hands over what is new, takes what comes, never waits.

The process is started when there is something to learn from, or something that an earlier life has kept. If it ends
early, lengths are forecast without it.
"""

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scheduler_svc.lengths import LengthEstimates
from scheduler_svc.ranker.messages import FILE, LEAST_EXAMPLES, example_of_json, example_to_json, lines

logger = logging.getLogger(__name__)

_ROOT = Path(__file__).resolve().parent.parent.parent
"""That `-m` needs to find the worker, wherever the scheduler was started."""
# It works beside engines and the trainer: a thread a core would be in their way.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
_LONGEST_LINE = 2**24
_END_S = 10.0


class RankerProcess:
    """Runs at most one process; `run` is its life."""

    def __init__(
        self, estimates: LengthEstimates, folder: Path, base_model: str, seed: int, wake: Callable[[], None]
    ) -> None:
        """
        Args:
            estimates: asked for what the ranker is to do, told what it says.
            folder: where it keeps what it knows.
            base_model: see LengthLearner.
            wake: called when it has said something.
        """
        self._estimates = estimates
        self._folder = folder
        self._base_model = base_model
        self._seed = seed
        self._wake = wake
        self._work = asyncio.Event()

    def look(self) -> None:
        """There may be something new to hand over. Call it on the event loop."""
        if self._estimates.has_requests:
            self._work.set()

    async def run(self) -> None:
        """Goes on until it is cancelled; then the process keeps what it knows and ends."""
        while not ((self._folder / FILE).exists() or self._estimates.num_to_learn >= LEAST_EXAMPLES):
            await self._work.wait()
            self._work.clear()
        ours, theirs = socket.socketpair()
        with theirs:
            process = self._start(theirs.fileno())
        reader, writer = await asyncio.open_connection(sock=ours, limit=_LONGEST_LINE)
        sending = asyncio.create_task(self._send(writer))
        try:
            await self._receive(reader)
            code = await asyncio.to_thread(process.wait)
            logger.warning("the length ranker has ended (exit code %d): lengths are forecast without it", code)
        finally:
            sending.cancel()
            writer.close()
            self._estimates.ranker_ended()
            self._wake()
            await asyncio.shield(asyncio.to_thread(_end, process))
        # Whoever waits for this one waits for the end of the service.
        await asyncio.Event().wait()

    def _start(self, descriptor: int) -> "subprocess.Popen[bytes]":
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        arguments = [str(os.getpid()), str(descriptor), str(self._folder), str(self._seed)]
        return subprocess.Popen(
            [sys.executable, "-m", "scheduler_svc.ranker.worker", *arguments, *filter(None, [self._base_model])],
            stdin=subprocess.DEVNULL,
            pass_fds=(descriptor,),
            env={**os.environ, **_ONE_THREAD, "PYTHONPATH": path},
        )

    async def _send(self, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                requests = self._estimates.take_requests(time.monotonic())
                learn = map(example_to_json, requests.to_learn)
                for message in (*lines("score", requests.to_score), *lines("learn", learn)):
                    writer.write(message)
                    await writer.drain()
                await self._work.wait()
                self._work.clear()

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            # One that was killed may have left half a line.
            while (line := await reader.readline()).endswith(b"\n"):
                self._take(json.loads(line))
                # Many lines may have come: others have their turn between them.
                await asyncio.sleep(0)

    def _take(self, message: dict[str, Any]) -> None:
        if "forecasts" in message:
            self._estimates.take_forecasts(message["forecasts"])
        elif "restored" in message:
            self._estimates.take_restored(map(example_of_json, message["restored"]))
        else:
            logger.info("the length ranker has learned from %d prompts", message["learned"])
            self._estimates.ranker_learned()
        self._wake()


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Waits for its end, now that nobody speaks to it any more."""
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        logger.warning("the length ranker did not end within %.0f s: killed", _END_S)
        process.kill()
        process.wait()
