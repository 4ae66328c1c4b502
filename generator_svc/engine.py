"""What an instance asks of an inference engine; vllm_engine.py and fake_engine.py give it.

An engine holds one weight version, admits requests by priority and answers each when its last token is drawn. It knows
nothing of Kafka, batches or leases.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from generator_svc.step_latencies import StepSpeed
from streamrl.v1.scheduler_pb2 import EngineProfile
from streamrl.v1.weights_pb2 import VersionManifest


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One answer to draw."""

    request_id: str
    prompt_token_ids: list[int]
    temperature: float
    max_tokens: int
    stop_token_ids: list[int]
    seed: int
    priority: int
    """Lower is admitted first."""
    prefix_token_ids: list[int] = field(default_factory=list)
    """The answer's first tokens, which another engine has drawn; `max_tokens` counts them."""
    to_the_end: bool = False
    """It has `max_tokens`, whatever the model would end it with: for measurements."""


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """An answer, without the tokens that the request came with; its parts speak of the same tokens."""

    token_ids: list[int]
    logprobs: list[float]
    """Of each token under the distribution it was drawn from (after temperature), natural logarithm."""
    version_spans: list[tuple[int, int]]
    """(weight version, number of tokens), in order; the counts add up to the number of tokens."""
    finish_reason: Literal["stop", "length", "interrupted"]
    started_s: float
    """Unix time at which the engine admitted it."""


@dataclass(frozen=True, slots=True)
class SwitchReport:
    """What a switch of weights took."""

    weight_version: int
    digest: str
    fetch_s: float
    """From negotiation to the last byte, the part that ran beside generation included."""
    switch_s: float
    """From the pause to the resume: the time in which nothing was generated."""


class Engine(Protocol):
    """An inference engine with a life: start, generate and switch, stop.

    Every coroutine raises `EngineDiedError` once the engine is gone; it does not come back.
    """

    max_running: int
    """Most sequences that run at once."""
    kv_cache_tokens: int
    """Tokens that the KV cache holds."""

    async def start(self, model_folder: Path, manifest: VersionManifest) -> SwitchReport:
        """Starts on the model's config (no weights in the folder) and loads the version that the manifest describes."""

    async def start_unloaded(self, model_folder: Path) -> None:
        """The same with made-up weights, which are as fast: for measurements."""

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Draws one answer. Cancelling the call aborts it inside the engine and frees its cache.

        Raises `ValueError` for a request that the engine cannot take, such as a prompt that is too long.
        """

    async def interrupt(self, request_id: str) -> None:
        """Ends a request where it stands: `generate` returns what it has, perhaps nothing, as "interrupted". One that
        has ended, or is not known, is left alone."""

    def progress(self) -> dict[str, int]:
        """Tokens drawn so far, by request id, of requests that have any."""

    def prefetch(self, manifest: VersionManifest) -> None:
        """Begins to bring a version near in the background; generation goes on. Returns at once; a second call for
        the same version changes nothing, one for another version replaces it."""

    async def switch(self, manifest: VersionManifest) -> SwitchReport:
        """Loads a version, running sequences paused in between (there are none at a batch boundary) and then continued:
        their cache is recomputed under the new weights or kept, as `weights.kv_on_swap` says. Caches of different
        versions are never mixed up by prefix sharing.

        Raises `WeightTransferError` when it could not be fetched or its digests disagree; the old weights stay.
        """

    def forget_fetched(self) -> None:
        """Drops the versions that lie near in host memory, kept bases included: the next one is fetched anew, and
        whole. What is loaded stays loaded."""

    async def score(self, token_ids: list[int]) -> list[float]:
        """Log-probs of token_ids[1:], each given those before it, at temperature 1 under the loaded version. Takes the
        next free place among the running sequences, before all that wait; needs one token less than the longest
        sequence."""

    def running(self) -> int:
        """Sequences inside the engine that have begun (an estimate from its last step)."""

    def step_latencies(self) -> list[StepSpeed]:
        """By batch size, of the steps since the last call, measured on the running engine."""

    def known_profile(self) -> EngineProfile | None:
        """How fast the engine is, where that is known without measuring."""

    async def pause(self) -> None:
        """Stops drawing tokens; what runs is kept."""

    async def resume(self) -> None:
        """Ends a pause."""

    async def sleep(self) -> None:
        """Releases the accelerator's memory (colocated mode); nothing may be running. Nothing to do on CPUs."""

    async def wake(self) -> None:
        """Takes the memory back; the weights are those of before."""

    async def died(self) -> None:
        """Returns when the started engine is gone, also when nobody asks it anything."""

    async def stop(self) -> None:
        """Ends the engine and its processes."""
