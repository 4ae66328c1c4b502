"""generator_svc on an emulated device: all of it is real but the engine's steps."""

import asyncio

from benchmarks.emulation.lengths import PaperLengths
from benchmarks.emulation.plan import Emulation, prompt_key
from generator_svc import engines
from generator_svc.engine import Engine
from generator_svc.fake_engine import AnswerLength, FakeEngine
from generator_svc.main import serve
from generator_svc.sample import ModelLimits
from generator_svc.settings import GeneratorSettings
from generator_svc.weight_fetcher import WeightSource
from streamrl import service


def _make_engine(settings: GeneratorSettings, _instance: str, _limits: ModelLimits, source: WeightSource) -> Engine:
    emulation = Emulation.of(settings.run)
    return FakeEngine(
        source,
        max_running=emulation.max_running,
        step_ms=emulation.step_ms,
        answer_length=_answer_length(emulation),
        load_s=emulation.load_s,
        prefill_token_ms=emulation.prefill_token_ms,
        recomputes_cache=settings.weights.swap == "in_flight" and settings.weights.kv_on_swap == "recompute",
        speed=emulation.speed,
    )


def _answer_length(emulation: Emulation) -> AnswerLength:
    known = emulation.answer_tokens
    if known:
        return lambda request: known[prompt_key(request.prompt_token_ids)]
    return PaperLengths(emulation.longest_answer)


async def _serve(settings: GeneratorSettings, instance: str, stop: asyncio.Event) -> None:
    await serve(settings, instance, stop, _make_engine)


SERVICE = service.Service("generator_svc", GeneratorSettings, _serve, engines.check)
