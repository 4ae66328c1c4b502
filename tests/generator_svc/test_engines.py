import asyncio
import os

import pytest

from generator_svc import engines
from generator_svc.fake_engine import FakeEngine
from generator_svc.sample import ModelLimits
from generator_svc.settings import GeneratorSettings
from generator_svc.vllm_settings import VllmSettings, bind_threads_of_one_process
from generator_svc.weight_fetcher import WeightSource

SOURCE = WeightSource("127.0.0.1:1", "run", 1, "generator-0", "")


def test_the_settings_choose_the_engine() -> None:
    async def scenario() -> None:
        settings = GeneratorSettings.model_validate({"generator": {"engine": "fake", "max_running": 5}})
        engine = engines.make_engine(settings, "generator-0", ModelLimits(64, 100), SOURCE)
        assert isinstance(engine, FakeEngine) and engine.max_running == 5
        await engine.stop()

    asyncio.run(scenario())


def test_more_threads_than_cores_are_refused() -> None:
    settings = GeneratorSettings.model_validate({"generator": {"engine": "fake", "num_threads": 100_000}})
    with pytest.raises(ValueError, match="num_threads"):
        engines.check(settings)


def test_an_engine_with_one_worker_on_cores_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "GOMP_CPU_AFFINITY"):
        monkeypatch.setenv(name, "as it was")
    core = str(min(os.sched_getaffinity(0)))

    def told(size: int, *, has_gpu: bool = False) -> VllmSettings:
        settings = GeneratorSettings.model_validate({"generator": {"tensor_parallel_size": size}})
        return engines.vllm_settings(settings, "generator-0", 64, has_gpu=has_gpu)

    for several in (told(2), told(1, has_gpu=True)):
        assert not several.in_one_process
        bind_threads_of_one_process(several)
        assert os.environ["GOMP_CPU_AFFINITY"] == "as it was"
    assert told(1).in_one_process
    bind_threads_of_one_process(told(1))
    assert (os.environ["OMP_NUM_THREADS"], os.environ["GOMP_CPU_AFFINITY"]) == ("1", core)
