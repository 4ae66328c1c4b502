"""A service of a replaying run: `python -m benchmarks.replay.process SETTINGS.json --instance NAME`.

The trainer takes no time (benchmarks/emulation/trainer.py). A generator is all real; only where an answer ends does not
depend on what is drawn, and on emulated devices a step does not end before its time. Each answer is noted, with the
times at which it was asked for and over.
"""

import asyncio
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from benchmarks.replay.workload import ReplayedLengths
from generator_svc import engines
from generator_svc.engine import Engine, GenerationRequest, GenerationResult
from generator_svc.main import serve
from generator_svc.sample import ModelLimits
from generator_svc.settings import GeneratorSettings
from generator_svc.vllm_engine import VllmEngine
from generator_svc.weight_fetcher import WeightSource
from streamrl import service

if TYPE_CHECKING:
    from vllm import SamplingParams

ANSWERS = "answers"
"""Folder of the noted answers in that of the run: a file an instance, a line each."""
ON_DEVICES = "on_devices"
"""A file in the run's folder: each engine has an emulated device of its own."""


class NotedAnswer(BaseModel):
    """What an instance drew of an answer of a training batch."""

    model_config = ConfigDict(frozen=True)

    batch: int
    asked_s: float
    """Unix time."""
    ended_s: float
    num_tokens: int
    """Drawn here."""
    handed_over: bool
    """It goes on elsewhere."""


class ReplayingEngine(VllmEngine):
    """Draws no stop token, and ends where the answer is to end."""

    def __init__(self, *arguments: Any, lengths: ReplayedLengths, notes: Path) -> None:
        super().__init__(*arguments)
        self._lengths = lengths
        notes.parent.mkdir(exist_ok=True)
        self._notes = notes.open("a", buffering=1)

    def sampling(self, request: GenerationRequest) -> "SamplingParams":
        """An answer to be replayed has no stop token before its end: with one in it, it could not go on elsewhere."""
        sampling = super().sampling(request)
        if request.to_the_end:
            sampling.min_tokens = sampling.max_tokens
        return sampling

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """See `Engine`."""
        # incarnation/batch/group/sample/dispatch; those of evaluations and of the profile are named otherwise.
        name = request.request_id.split("/")
        length = self._lengths.tokens(request.prompt_token_ids, int(name[3])) if len(name) == 5 else None
        if length is None:
            return await super().generate(request)
        asked_s = time.time()
        result = await super().generate(replace(request, max_tokens=length, to_the_end=True))
        noted = NotedAnswer(
            batch=int(name[1]),
            asked_s=asked_s,
            ended_s=time.time(),
            num_tokens=len(result.token_ids),
            handed_over=result.finish_reason == "interrupted",
        )
        self._notes.write(noted.model_dump_json() + "\n")
        return replace(result, finish_reason="stop") if result.finish_reason == "length" else result


def _make_engine(settings: GeneratorSettings, instance: str, limits: ModelLimits, source: WeightSource) -> Engine:
    of_engine = engines.vllm_settings(settings, instance, limits.max_model_len, has_gpu=False)
    if (settings.run.folder / ON_DEVICES).exists():
        of_engine = replace(of_engine, worker_class="benchmarks.replay.paced_worker.PacedWorker")
    return ReplayingEngine(
        of_engine,
        source,
        lengths=ReplayedLengths.read(settings.run.folder),
        notes=settings.run.folder / ANSWERS / f"{instance}.jsonl",
    )


async def _serve(settings: GeneratorSettings, instance: str, stop: asyncio.Event) -> None:
    await serve(settings, instance, stop, _make_engine)


def main() -> int:
    """The exit code."""
    if sys.argv[-1] == "trainer":
        from benchmarks.emulation import trainer

        return service.main(trainer.SERVICE)
    return service.main(service.Service("generator_svc", GeneratorSettings, _serve, engines.check))


if __name__ == "__main__":
    service.end_process(main())
