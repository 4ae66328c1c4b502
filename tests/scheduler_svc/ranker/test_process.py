"""The ranker's process, between start and end."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from scheduler_svc.lengths import LengthEstimates
from scheduler_svc.ranker.process import RankerProcess
from streamrl.identity import PURPOSE_TRAIN
from streamrl.v1.records_pb2 import Prompt
from streamrl.v1.sample_pb2 import SamplingSettings

# It takes what processor time others leave.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUM_PROMPTS = 100


class Scheduler:
    """What the ranker sees of one: estimates, and a loop that is woken."""

    def __init__(self, folder: Path) -> None:
        self.estimates = LengthEstimates(uses_ranker=True)
        self.ranker = RankerProcess(self.estimates, folder, "", 0, self._wake)
        self._woken = asyncio.Event()

    def _wake(self) -> None:
        self._woken.set()

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(240):
            while not true():
                await self._woken.wait()
                self._woken.clear()
                if self.estimates.take_refresh():
                    self.estimates.take_prompt(prompt("new", 40))
                    self.ranker.look()


@contextlib.asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Scheduler]:
    scheduler = Scheduler(folder)
    life = asyncio.create_task(scheduler.ranker.run())
    try:
        yield scheduler
    finally:
        life.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await life


def prompt(prompt_id: str, number: int) -> Prompt:
    sampling = SamplingSettings(max_tokens=1000)
    return Prompt(purpose=PURPOSE_TRAIN, prompt_id=prompt_id, token_ids=[1, number], sampling=sampling, num_samples=1)


def answer(scheduler: Scheduler) -> None:
    for index in range(NUM_PROMPTS):
        number = 20 + index % 30
        scheduler.estimates.take_answers(prompt(f"p{index}", number), 0, [(number, False)], None)
    scheduler.ranker.look()


def workers() -> list[psutil.Process]:
    children = psutil.Process(os.getpid()).children()
    return [child for child in children if "scheduler_svc.ranker.worker" in child.cmdline()]


async def test_it_learns_forecasts_and_goes_on_in_its_next_life(tmp_path: Path) -> None:
    async with running(tmp_path / "ranker") as scheduler:
        await asyncio.sleep(0)
        assert not workers()  # nothing to learn from yet
        answer(scheduler)
        await scheduler.until(lambda: scheduler.estimates.foretell(prompt("new", 40)).by_ranker is not None)
        (worker,) = workers()
        assert worker.nice() == 19
        assert 20 < scheduler.estimates.expected_tokens("new", 1000) < 60
    assert not workers()
    assert (tmp_path / "ranker" / "ranker.safetensors").is_file()

    async with running(tmp_path / "ranker") as scheduler:
        await scheduler.until(lambda: scheduler.estimates.foretell(prompt("new", 40)).by_ranker is not None)
        known = [scheduler.estimates.history.last_mean(f"p{index}") for index in range(NUM_PROMPTS)]
        assert sum(mean == 20 + index % 30 for index, mean in enumerate(known)) > 0.8 * NUM_PROMPTS


async def test_lengths_are_foretold_without_it_when_it_dies(tmp_path: Path) -> None:
    async with running(tmp_path / "ranker") as scheduler:
        answer(scheduler)
        await scheduler.until(lambda: scheduler.estimates.foretell(prompt("new", 40)).by_ranker is not None)
        workers()[0].send_signal(signal.SIGKILL)
        await scheduler.until(lambda: not scheduler.estimates.uses_ranker)
        scheduler.estimates.take_prompt(prompt("other", 40))
        assert not scheduler.estimates.has_requests
        assert scheduler.estimates.expected_tokens("other", 1000) == 1000
