"""`python -m generator_svc.measure SETTINGS.json MODEL_FOLDER RESULT.json`: how fast an engine of the settings is.

For `streamrl profile`. The engine runs alone, on the model's config and made-up weights: no other service is needed.
"""

import asyncio
import json
import logging
import os
import sys
from pathlib import Path

from generator_svc import engines
from generator_svc.profiler import known_or_measured
from generator_svc.sample import ModelLimits
from generator_svc.settings import GeneratorSettings
from generator_svc.weight_fetcher import WeightSource
from streamrl.engine_profile import to_json
from streamrl.errors import StreamRLError
from streamrl.settings import load

_EXIT_FAILED, _EXIT_BAD_INPUT = 1, 2


async def measure(settings: GeneratorSettings, model_folder: Path) -> dict[str, object]:
    """
    Raises:
        ValueError: the settings do not fit the model or this machine, or the engine could not be measured.
        EngineDiedError: the engine did not start, or died.
    """
    engines.check(settings)
    limits = ModelLimits.of(model_folder, settings.generator.max_model_len)
    nowhere = WeightSource(address="", run_id="", attempt=1, receiver="", site="")
    engine = engines.make_engine(settings, "generator-0", limits, nowhere)
    try:
        await engine.start_unloaded(model_folder)
        profile = await known_or_measured(engine, limits, settings.generator.profile_s)
    finally:
        await engine.stop()
    return {
        "model": settings.model.path,
        "engine": settings.generator.engine,
        "max_running": engine.max_running,
        "kv_cache_tokens": engine.kv_cache_tokens,
        **to_json(profile),
    }


def main(argv: list[str]) -> int:
    """The exit code: 0 done, 1 failed, 2 bad input. What went wrong is the last line of standard error."""
    settings_file, model_folder, result = map(Path, argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        found = asyncio.run(measure(load(GeneratorSettings, settings_file), model_folder))
    except (ValueError, StreamRLError) as error:
        sys.stderr.write(f"{error}\n")
        return _EXIT_BAD_INPUT if isinstance(error, ValueError) else _EXIT_FAILED
    result.write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    logging.shutdown()
    # As in __main__.py: taking an interpreter down that has vLLM in it takes seconds.
    os._exit(exit_code)
