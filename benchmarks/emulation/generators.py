"""generator_svc on emulated devices: `python -m benchmarks.emulation.generators SETTINGS.json NUM_INSTANCES`.

All of it is real but the engine's steps. Each instance is a process of its own, forked from this one when everything is
imported: sixteen interpreters that import the same take a minute of two cores, and this takes a second.
"""

import asyncio
import os
import sys
from pathlib import Path

from benchmarks.emulation.lengths import ReplayedLengths
from benchmarks.emulation.plan import Emulation
from generator_svc import engines
from generator_svc.engine import Engine
from generator_svc.fake_engine import FakeEngine
from generator_svc.main import serve
from generator_svc.sample import ModelLimits
from generator_svc.settings import GeneratorSettings
from generator_svc.weight_fetcher import WeightSource
from streamrl import lifetime, service


def _make_engine(settings: GeneratorSettings, _instance: str, _limits: ModelLimits, source: WeightSource) -> Engine:
    emulation = Emulation.of(settings.run)
    return FakeEngine(
        source,
        max_running=emulation.max_running,
        step_ms=emulation.step_ms,
        answer_length=ReplayedLengths(emulation.longest_answer),
        load_s=emulation.load_s,
        prefill_token_ms=emulation.prefill_token_ms,
        recomputes_cache=settings.weights.swap == "in_flight" and settings.weights.kv_on_swap == "recompute",
        speed=emulation.speed,
    )


async def _serve(settings: GeneratorSettings, instance: str, stop: asyncio.Event) -> None:
    await serve(settings, instance, stop, _make_engine)


def main(settings_file: Path, num_instances: int) -> int:
    """Returns when the first of them has ended."""
    parent = os.getpid()
    for index in range(num_instances):
        if os.fork() == 0:
            lifetime.die_with_parent(parent)
            _become(settings_file, f"generator-{index}")
    _, status = os.wait()
    return os.waitstatus_to_exitcode(status)


def _become(settings_file: Path, instance: str) -> None:
    log = os.open(settings_file.parent / "logs" / f"{instance}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    emulated = service.Service("generator_svc", GeneratorSettings, _serve, engines.check)
    os._exit(service.main(emulated, [str(settings_file), "--instance", instance]))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
