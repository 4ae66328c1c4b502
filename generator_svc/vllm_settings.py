"""What a vLLM engine is given, and the environment that vLLM reads while it is imported."""

import logging
import os
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """Fixed for the life of an engine."""

    max_running: int
    """Most sequences that run at once."""
    max_model_len: int
    """Most tokens of a prompt and its answer together."""
    dtype: Literal["float32", "bfloat16", "float16"]
    """Of weights and cache; versions of another dtype are converted while they are loaded."""
    kv_on_swap: Literal["recompute", "keep"] = "recompute"
    """What happens to the cache of running sequences at a switch."""
    enable_prefix_caching: bool = True
    """Sequences with the same beginning share its cache: a group's prompt is computed once."""
    tensor_parallel_size: int = 1
    """Workers, each with a share of every tensor."""
    enforce_eager: bool = True
    """Neither compile nor capture graphs: starts sooner, and on GPUs runs slower."""
    enable_sleep_mode: bool = False
    """GPUs: memory can be released between batches (colocated mode)."""
    kv_cache_gib: float | None = None
    """Memory for the cache; None, on GPUs: what `gpu_memory_utilization` leaves."""
    gpu_memory_utilization: float = 0.9
    """GPUs: share of the memory that weights and cache take together."""
    step_tokens: int | None = None
    """CPUs: most tokens of a step, at least `max_model_len`; a prompt is computed in one step. (Where one is cut, vLLM
    takes back a draw from the request's generator, which kills it on CPUs: their generators cannot go back.) None: as
    vLLM likes."""
    cpu_cores: str = ""
    """CPUs: cores that each worker is bound to, such as "0" or, for two workers, "0-3|4-7". Empty: not bound."""
    cpu_threads: int = 1
    """CPUs: threads of a worker that is not bound to cores."""
    in_one_process: bool = False
    """CPUs, one worker: it computes in the process that schedules, so that nothing of a step is sent from one to the
    other."""
    worker_class: str = "auto"
    """Class of the workers, as "module.Class". "auto": vLLM's own for this machine."""

    @property
    def salt_requests(self) -> bool:
        """Whether requests carry the version, so that those of different versions share no cache."""
        return self.kv_on_swap == "keep" and self.enable_prefix_caching


def prepare_environment(settings: VllmSettings) -> None:
    """Sets what vLLM reads from the environment of this process and hands on to the engine's. Call it before anything
    imports vllm."""
    os.environ.update(
        {
            # Nothing here needs the network: the model's files come from weights_svc.
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            # Standard output belongs to the command's last line.
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",
            # Its warnings are about what is wanted here: no tokenizer, no compiling, buffers that no version has.
            "VLLM_LOGGING_LEVEL": "DEBUG" if logging.getLogger().isEnabledFor(logging.DEBUG) else "ERROR",
            # In the engine's processes: of their libraries, and of shared memory that is left when they are killed,
            # which is cleaned up by the one that warns.
            "PYTHONWARNINGS": "ignore::FutureWarning,ignore:resource_tracker:UserWarning",
            # Of all plugins installed beside vLLM only ours.
            "VLLM_PLUGINS": "streamrl",
            # gRPC does not survive a fork.
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_CPU_OMP_THREADS_BIND": settings.cpu_cores or "nobind",
        }
    )
    if not settings.cpu_cores:
        os.environ["OMP_NUM_THREADS"] = str(settings.cpu_threads)


def bind_threads_of_one_process(settings: VllmSettings) -> None:
    """Sets what vLLM sets for a worker that it starts, for the engine's process that is started next. Call it when
    PyTorch is loaded: its OpenMP reads it then, and would bind this process too."""
    if settings.in_one_process and settings.cpu_cores:
        cores = settings.cpu_cores.split(",")
        os.environ.update({"OMP_NUM_THREADS": str(len(cores)), "GOMP_CPU_AFFINITY": " ".join(cores)})
