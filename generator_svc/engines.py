"""Makes the engine that the settings ask for. Whatever is heavy is imported here, when it is known to be needed."""

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING

from generator_svc.engine import Engine
from generator_svc.sample import ModelLimits
from generator_svc.settings import GeneratorSettings, cores_of_workers, instance_index
from generator_svc.weight_fetcher import WeightSource
from streamrl.engine_profile import from_file

if TYPE_CHECKING:
    from generator_svc.vllm_settings import VllmSettings

_KV_CACHE_GIB_ON_CPU = 1.0
_STEP_TOKENS_ON_CPU = 4096


def check(settings: GeneratorSettings) -> None:
    """
    Raises:
        ValueError: this machine cannot run the engine.
    """
    generator = settings.generator
    if generator.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ValueError("generator.engine is vllm, but vLLM is not installed here: run `make install`")
    if generator.profile is not None:
        from_file(generator.profile)
    num_cores = len(os.sched_getaffinity(0))
    if generator.num_threads > num_cores:
        raise ValueError(f"generator.num_threads is {generator.num_threads}, but this machine has {num_cores} cores")


def preload(settings: GeneratorSettings, instance: str) -> None:
    """Imports what the engine needs: seconds that pass beside the wait for the first version. Blocks."""
    if settings.generator.engine == "vllm":
        from generator_svc.vllm_settings import prepare_environment

        prepare_environment(vllm_settings(settings, instance, settings.generator.max_model_len, has_gpu=False))
        importlib.import_module("vllm.v1.engine.async_llm")


def make_engine(settings: GeneratorSettings, instance: str, limits: ModelLimits, source: WeightSource) -> Engine:
    """The engine, not started yet.

    Args:
        source: where it fetches weight versions.
    """
    generator = settings.generator
    if generator.engine == "fake":
        from generator_svc.fake_engine import FakeEngine

        return FakeEngine(source, max_running=generator.max_running, step_ms=generator.fake_step_ms)

    import torch

    from generator_svc.vllm_engine import VllmEngine

    has_gpu = torch.cuda.is_available()
    return VllmEngine(vllm_settings(settings, instance, limits.max_model_len, has_gpu=has_gpu), source)


def vllm_settings(settings: GeneratorSettings, instance: str, max_model_len: int, *, has_gpu: bool) -> "VllmSettings":
    """What an instance's vLLM is told."""
    from generator_svc.vllm_settings import VllmSettings

    generator = settings.generator
    num_threads = generator.num_threads or (0 if settings.pipeline.mode == "colocated" else 1)
    cores = cores_of_workers(
        instance_index(instance), generator.tensor_parallel_size, num_threads, sorted(os.sched_getaffinity(0))
    )
    return VllmSettings(
        max_running=generator.max_running,
        max_model_len=max_model_len,
        dtype=settings.model.dtype,
        kv_on_swap=settings.weights.kv_on_swap if settings.weights.swap == "in_flight" else "recompute",
        enable_prefix_caching=generator.enable_prefix_caching,
        tensor_parallel_size=generator.tensor_parallel_size,
        enforce_eager=generator.enforce_eager,
        step_tokens=None if has_gpu else max(_STEP_TOKENS_ON_CPU, max_model_len),
        enable_sleep_mode=has_gpu and settings.pipeline.mode == "colocated",
        kv_cache_gib=generator.kv_cache_gib or (None if has_gpu else _KV_CACHE_GIB_ON_CPU),
        gpu_memory_utilization=generator.gpu_memory_utilization,
        in_one_process=not has_gpu and generator.tensor_parallel_size == 1,
        cpu_cores="|".join(",".join(str(core) for core in worker) for worker in cores),
    )
