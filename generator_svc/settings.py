"""What generator_svc reads of the settings: its own section, and what follows from it for one instance.

How the engine understands these settings is the engine's affair (vllm_settings.py, fake_engine.py).
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from streamrl.settings import NonNegativeInt, PositiveInt, SamplingView, Seconds, ServiceSettings

_CANARY_ALARM_NATS = {"float32": 0.001, "bfloat16": 0.05}


class GeneratorSection(SamplingView):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())

    engine: Literal["vllm", "fake"] = "vllm"
    """vllm: real inference. fake: made-up answers after made-up times, for tests of everything around the engine."""
    max_running: Annotated[int, Field(gt=0, le=65_536)] = 64
    """Most sequences that an instance's engine runs at once."""
    kv_cache_gib: Annotated[float, Field(ge=0, le=1_000_000)] = 0.0
    """Memory of an instance's KV cache. 0: on GPUs what `gpu_memory_utilization` leaves, on CPUs 1 GiB."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """GPUs: share of the memory that weights and KV cache take together."""
    tensor_parallel_size: PositiveInt = 1
    """Workers of an instance, each with a share of every tensor."""
    num_threads: NonNegativeInt = 0
    """CPUs: cores that each worker of an instance is bound to. 0: all of them in mode colocated, else 1."""
    enforce_eager: bool = True
    """Neither compile the model nor capture graphs: starts sooner, and on GPUs runs slower."""
    enable_prefix_caching: bool = True
    """The samples of a group share the cache of their prompt."""
    profile_s: Annotated[float, Field(ge=0, le=3600)] = 2.0
    """About how long an instance measures how fast its engine is before it takes work: steps by batch size and by the
    tokens in the cache, and prompts. Planning begins with that; later it goes by the steps that are made. 0: it is not
    measured, and the scheduler guesses until it has seen steps."""
    profile: Path | None = None
    """A file that `streamrl profile --out` has written: an instance takes what it says, and measures nothing. Left out:
    each instance measures."""
    drain_timeout_s: Seconds = 30.0
    """An instance that is asked to end finishes what runs for at most this long, and gives the rest back."""
    canary_alarm_nats: Annotated[float, Field(ge=0)] = 0.0
    """After each switch of weights an instance warns when its log-probs of the canaries differ from the trainer's by
    more than this on average. 0: 0.001 in float32, 0.05 in bfloat16."""
    fake_step_ms: dict[PositiveInt, Annotated[float, Field(gt=0, le=3_600_000)]] = Field(
        default_factory=lambda: {1: 1.0, 64: 2.0}
    )
    """Engine `fake`: milliseconds of a step by number of running sequences; linear between these, constant outside."""


class GeneratorSettings(ServiceSettings):
    """What an instance reads."""

    generator: GeneratorSection = GeneratorSection()

    @property
    def canary_alarm_nats(self) -> float:
        """The limit that applies: as set, or the one of the dtype."""
        return self.generator.canary_alarm_nats or _CANARY_ALARM_NATS[self.model.dtype]


def instance_index(instance: str) -> int:
    """The number at the end of an instance's name: 3 of "generator-3"; 0 when there is none."""
    number = re.search(r"\d+$", instance)
    return int(number.group()) if number else 0


def cores_of_workers(index: int, num_workers: int, num_threads: int, available: Sequence[int]) -> list[list[int]]:
    """The CPU cores that each worker of an instance is bound to, so that instances spread over the machine.

    Args:
        index: of the instance.
        num_threads: cores of each worker; 0: all that are available.
        available: the machine's cores that this process may use.

    Returns:
        A list of cores a worker, disjoint between workers and instances while there are enough.
    """
    width = min(num_threads or len(available), len(available))
    first = index * num_workers * width
    return [
        sorted(available[(first + worker * width + offset) % len(available)] for offset in range(width))
        for worker in range(num_workers)
    ]
