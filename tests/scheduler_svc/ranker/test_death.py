"""A process of the ranker that is killed at any moment, here by a stand-in for it."""

import asyncio
import contextlib
import subprocess
from pathlib import Path

import pytest

from scheduler_svc.lengths import LengthEstimates
from scheduler_svc.ranker.messages import FILE
from scheduler_svc.ranker.process import RankerProcess

FORECAST = '{"forecasts":[["a",[1,2,3,4,5,6,7,8,9,10,11,12,13]]]}\n'


class Breaking(RankerProcess):
    """Its process says something, and ends."""

    said = ""

    def _start(self, descriptor: int) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(["/usr/bin/printf", "%s", self.said], stdout=descriptor)


@pytest.mark.parametrize("said", ["", FORECAST, FORECAST + FORECAST[:20], FORECAST[:1]])
async def test_whatever_it_was_saying_when_it_was_killed_the_scheduler_goes_on(tmp_path: Path, said: str) -> None:
    (tmp_path / FILE).touch()
    estimates, woken = LengthEstimates(uses_ranker=True), asyncio.Event()
    ranker = Breaking(estimates, tmp_path, "", 0, woken.set)
    ranker.said = said
    life = asyncio.create_task(ranker.run())
    async with asyncio.timeout(10):
        while estimates.uses_ranker:
            await woken.wait()
            woken.clear()
    ended, _ = await asyncio.wait({life}, timeout=0.2)
    assert not ended
    assert (estimates.expected_tokens("a", 100) < 100) == (FORECAST in said)
    life.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await life
