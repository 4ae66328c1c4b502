import asyncio

import pytest

from generator_svc import engines
from generator_svc.fake_engine import FakeEngine
from generator_svc.sample import ModelLimits
from generator_svc.settings import GeneratorSettings
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
