"""What is measured of an engine is what it is like."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from generator_svc.engine import GenerationRequest, GenerationResult
from generator_svc.fake_engine import FakeEngine
from generator_svc.profiler import Profiler, profile_of
from generator_svc.sample import ModelLimits
from streamrl.v1.scheduler_pb2 import EngineProfile
from tests.jumping_loop import run

LIMITS = ModelLimits(max_model_len=4096, vocab_size=100)


class AnyEngine(FakeEngine):
    """One whose answers end at once, unless they must not."""

    def __init__(self, slower: float = 1.0, **settings: Any) -> None:
        super().__init__(
            cast(Any, SimpleNamespace()), max_running=16, step_ms={1: 2.0 * slower, 16: 8.0 * slower},
            answer_length=lambda _request: 1, **settings,
        )  # fmt: skip
        self._alive, self._weight_version, self._vocabulary = True, 0, 100
        self._instance.stand_until(asyncio.get_running_loop().time())


def measured(**settings: Any) -> EngineProfile:
    async def measure() -> EngineProfile:
        return await Profiler(AnyEngine(**settings), LIMITS, 2.0).measure()

    return run(measure())


def test_steps_held_context_and_prompts_are_found() -> None:
    profile = measured(held_token_ms=0.002, prefill_token_ms=0.02)
    steps = {step.batch_size: step.latency_s for step in profile.steps}
    assert steps.keys() == {1, 4, 16}
    assert steps[1] == pytest.approx(0.002, rel=0.1)
    # Each sequence holds its prompt's 8 tokens, and half of its answer's 64 on average.
    assert steps[16] == pytest.approx(0.008 + 16 * 40 * 2e-6, rel=0.05)
    assert profile.held_token_s == pytest.approx(2e-6, rel=0.1)
    assert profile.prefill_token_s == pytest.approx(2e-5, rel=0.1)


def test_a_slow_engine_is_measured_at_fewer_points_in_about_the_time_there_is() -> None:
    async def measure(slower: float) -> tuple[list[int], float]:
        started_s = asyncio.get_running_loop().time()
        profile = await Profiler(AnyEngine(slower), LIMITS, 2.0).measure()
        return [step.batch_size for step in profile.steps], asyncio.get_running_loop().time() - started_s

    sizes, took_s = run(measure(1.0))
    assert sizes == [1, 4, 16]
    assert took_s < 2.5
    sizes, took_s = run(measure(16.0))
    assert sizes == [1, 16]
    # Eight steps at each point, however slow they are.
    assert took_s < 5.0


@pytest.mark.parametrize("max_model_len", [4, 9, 64, 200])
def test_no_request_is_longer_than_the_model_takes(max_model_len: int) -> None:
    longest = 0

    class Watched(AnyEngine):
        async def generate(self, request: GenerationRequest) -> GenerationResult:
            nonlocal longest
            longest = max(longest, len(request.prompt_token_ids) + request.max_tokens)
            return await super().generate(request)

    async def measure() -> EngineProfile:
        return await Profiler(Watched(), ModelLimits(max_model_len, 100), 0.1).measure()

    assert run(measure()).steps
    assert 0 < longest <= max_model_len


def test_what_costs_nothing_is_found_to_cost_nothing() -> None:
    assert measured().held_token_s == 0.0


def test_what_is_known_or_not_wanted_is_not_measured() -> None:
    async def scenario() -> None:
        engine = AnyEngine(prefill_token_ms=0.5)
        known = await profile_of(engine, LIMITS, 2.0)
        assert known is not None
        assert known.prefill_token_s == 0.0005
        assert known.steps[0].latency_s == 0.002
        unknown = SimpleNamespace(known_profile=lambda: None)
        assert await profile_of(cast(Any, unknown), LIMITS, 0.0) is None

    run(scenario())
