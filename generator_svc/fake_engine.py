"""An engine without a model: continuous batching in simulated time, made-up answers, real weight fetches.

It stands in for vLLM where everything but inference is tested or measured. What it keeps true: sequences are admitted
by priority into a bounded number of places and a bounded cache; each step gives every running sequence one token and
takes as long as the profile says; switches interrupt and continue; every token knows its version. How time goes on is
streamrl/planning/simulated_instance.py, which fleets are simulated with as well.
"""

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist

from generator_svc.engine import GenerationRequest, GenerationResult, SwitchReport
from generator_svc.prefetcher import Prefetcher
from generator_svc.step_latencies import StepLatencies, StepSpeed
from generator_svc.weight_fetcher import FetchedVersion, WeightSource
from streamrl.errors import EngineDiedError
from streamrl.planning.profile import InstanceProfile, TokenLatency
from streamrl.planning.simulated_instance import SimulatedInstance, SimulatedSequence
from streamrl.v1.scheduler_pb2 import EngineProfile, StepLatency
from streamrl.v1.weights_pb2 import VersionManifest

AnswerLength = Callable[[GenerationRequest], int]
"""Tokens of an answer, its stop token included; `max_tokens` cuts it."""


def log_normal_length(request: GenerationRequest) -> int:
    """Long-tailed: half of the answers have 24 tokens or fewer, one in a hundred more than 195. One that goes on is as
    long as those are that have come so far."""
    there = len(request.prefix_token_ids)
    passed = _LOG_LENGTH.cdf(math.log(there + 0.5)) if there else 0.0
    chance = passed + (1 - passed) * random.Random(request.seed).random()
    return max(there + 1, round(math.exp(_LOG_LENGTH.inv_cdf(min(max(chance, 1e-12), 1 - 1e-12)))))


_LOG_LENGTH = NormalDist(math.log(24), 0.9)


@dataclass(eq=False)
class _Answer:
    """A request inside the engine."""

    request: GenerationRequest
    sequence: SimulatedSequence
    result: "asyncio.Future[GenerationResult]"
    started_s: float = 0.0
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(weight version, tokens there when it began); empty: it has not begun."""


class FakeEngine:
    """See `Engine`. Nothing runs between events: one timer stands for the next answer to end."""

    def __init__(
        self,
        source: WeightSource,
        *,
        max_running: int,
        step_ms: Mapping[int, float],
        answer_length: AnswerLength = log_normal_length,
        load_s: float = 0.02,
        kv_cache_tokens: int = 2**20,
        held_token_ms: float = 0.0,
        prefill_token_ms: float = 0.0,
        recomputes_cache: bool = False,
        speed: float = 1.0,
    ) -> None:
        """
        Args:
            step_ms: the latency profile, by number of running sequences.
            load_s: simulated seconds that a switch stands still.
            held_token_ms: what each token in the cache adds to a step.
            prefill_token_ms: what each token of a prompt takes when its answer begins.
            recomputes_cache: whether the cache of what runs is computed again after a switch, which takes as long for
                each token of it.
            speed: simulated seconds in a real one.
        """
        self.max_running = max_running
        self.kv_cache_tokens = kv_cache_tokens
        self._latencies = StepLatencies()
        self._instance = SimulatedInstance(
            InstanceProfile(
                TokenLatency({size: milliseconds / 1000 for size, milliseconds in step_ms.items()}),
                max_running,
                held_token_s=held_token_ms / 1000,
                prefill_token_s=prefill_token_ms / 1000,
                kv_cache_tokens=kv_cache_tokens,
            ),
            self._latencies.add,
        )
        self._answer_length = answer_length
        self._load_s = load_s
        self._recompute_token_s = prefill_token_ms / 1000 if recomputes_cache else 0.0
        self._speed = speed
        self._prefetcher = Prefetcher(source)
        self._vocabulary = 2
        self._weight_version = -1
        self._alive = False
        self._stopped = asyncio.Event()
        self._paused = False
        self._loading = asyncio.Lock()
        self._answers: dict[Hashable, _Answer] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def start(self, model_folder: Path, manifest: VersionManifest) -> SwitchReport:
        await self.start_unloaded(model_folder)
        return await self.switch(manifest)

    async def start_unloaded(self, model_folder: Path) -> None:
        config = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
        self._vocabulary = config["vocab_size"]
        self._alive = True
        self._instance.stand_until(self._now_s())

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self._check_alive()
        self._catch_up()
        there = len(request.prefix_token_ids)
        wanted = request.max_tokens if request.to_the_end else self._answer_length(request)
        num_tokens = min(max(there + 1, wanted), request.max_tokens)
        # Requests are told apart by what they are, not by their ids: nothing here needs those to differ.
        key = object()
        sequence = SimulatedSequence(key, num_tokens, request.priority, len(request.prompt_token_ids), there)
        answer = self._answers[key] = _Answer(request, sequence, asyncio.get_running_loop().create_future())
        self._instance.submit(sequence)
        self._go_on()
        try:
            return await answer.result
        except asyncio.CancelledError:
            if self._alive:
                self._catch_up()
                self._instance.withdraw(key)
                self._answers.pop(key, None)
                self._go_on()
            raise

    async def interrupt(self, request_id: str) -> None:
        self._check_alive()
        self._catch_up()
        for key, answer in list(self._answers.items()):
            if answer.request.request_id == request_id and not answer.result.done():
                self._instance.withdraw(key)
                del self._answers[key]
                answer.result.set_result(self._result(answer, interrupted=True))
        self._go_on()

    def progress(self) -> dict[str, int]:
        self._catch_up()
        there = {
            answer.request.request_id: self._instance.tokens_there(answer.sequence)
            - len(answer.request.prefix_token_ids)
            for answer in self._answers.values()
        }
        return {request_id: num_tokens for request_id, num_tokens in there.items() if num_tokens > 0}

    async def score(self, token_ids: list[int]) -> list[float]:
        self._check_alive()
        return [self._logprob] * (len(token_ids) - 1)

    def prefetch(self, manifest: VersionManifest) -> None:
        self._prefetcher.begin(manifest)

    def forget_fetched(self) -> None:
        self._prefetcher.forget()

    async def switch(self, manifest: VersionManifest) -> SwitchReport:
        self._check_alive()
        fetched = await self._prefetcher.take(manifest)
        return await asyncio.shield(asyncio.ensure_future(self._load(fetched)))

    async def _load(self, fetched: FetchedVersion) -> SwitchReport:
        manifest = fetched.manifest
        try:
            async with self._loading:
                started = time.monotonic()
                was_paused = self._paused
                self._stand_still()
                await asyncio.sleep(self._load_s / self._speed)
                self._weight_version = manifest.weight_version
                for sequence in self._instance.running.values():
                    there = self._instance.tokens_there(sequence)
                    self._answers[sequence.key].versions.append((self._weight_version, there))
                self._paused = was_paused
                # It may be ahead by prompts that it computes.
                begins_s = max(self._instance.time_s, self._now_s())
                self._instance.stand_until(begins_s + self._recompute_token_s * self._instance.held_tokens)
                self._go_on()
        finally:
            fetched.close()
        return SwitchReport(manifest.weight_version, manifest.digest, fetched.fetch_s, time.monotonic() - started)

    def running(self) -> int:
        return len(self._instance.running)

    def step_latencies(self) -> list[StepSpeed]:
        self._catch_up()
        return [steps._replace(latency_s=steps.latency_s / self._speed) for steps in self._latencies.take()]

    def known_profile(self) -> EngineProfile | None:
        profile = self._instance.profile
        sizes = [2**bits for bits in range(self.max_running.bit_length())]
        return EngineProfile(
            steps=[
                StepLatency(batch_size=size, latency_s=profile.token_latency(size) / self._speed, num_steps=1)
                for size in sorted({*sizes, self.max_running})
            ],
            held_token_s=profile.held_token_s / self._speed,
            prefill_token_s=profile.prefill_token_s / self._speed,
        )

    async def pause(self) -> None:
        self._check_alive()
        async with self._loading:
            self._stand_still()

    async def resume(self) -> None:
        self._check_alive()
        async with self._loading:
            self._catch_up()
            self._paused = False
            self._go_on()

    async def sleep(self) -> None:
        self._check_alive()

    async def wake(self) -> None:
        self._check_alive()

    async def died(self) -> None:
        await self._stopped.wait()

    async def stop(self) -> None:
        self._alive = False
        self._stopped.set()
        self._set_timer(None)
        self._prefetcher.close()
        for answer in self._answers.values():
            if not answer.result.done():
                answer.result.set_exception(EngineDiedError("the engine was stopped"))
        self._answers.clear()

    # The simulation.

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time() * self._speed

    def _stand_still(self) -> None:
        self._catch_up()
        self._paused = True
        self._set_timer(None)

    def _catch_up(self) -> None:
        """Draws all tokens that are due, one ended answer after the other: each changes how long the next step is."""
        instance, now_s = self._instance, self._now_s()
        # What is left of a step may be too short to move the clock on.
        while not self._paused and instance.running and (instance.time_s < now_s or instance.next_event_s() <= now_s):
            for sequence in instance.step(now_s):
                self._end(self._answers.pop(sequence.key))
            self._admit()
        instance.stand_until(now_s)

    def _go_on(self) -> None:
        """Fills free places and sets the timer for the next answer to end."""
        if self._paused or not self._alive:
            return
        self._admit()
        due_s = self._instance.next_event_s()
        self._set_timer(due_s / self._speed if due_s < math.inf else None)

    def _set_timer(self, due: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if due is None else asyncio.get_running_loop().call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        self._catch_up()
        self._go_on()

    def _admit(self) -> None:
        while admitted := self._instance.admit():
            for sequence in admitted:
                answer = self._answers[sequence.key]
                if answer.result.done():
                    # It was aborted, and the one who waits for it has not heard of it yet.
                    self._instance.withdraw(sequence.key)
                    continue
                if not answer.versions:
                    answer.started_s = time.time()
                # One that was driven out of the cache goes on with what it has, perhaps under later weights.
                answer.versions.append((self._weight_version, sequence.tokens_there))

    def _end(self, answer: _Answer) -> None:
        if not answer.result.done():
            answer.result.set_result(self._result(answer))

    @property
    def _logprob(self) -> float:
        """Of any token: this engine knows nothing."""
        return -math.log(self._vocabulary)

    def _result(self, answer: _Answer, *, interrupted: bool = False) -> GenerationResult:
        request, sequence = answer.request, answer.sequence
        end = sequence.tokens_there if interrupted else sequence.num_tokens
        num_tokens = end - len(request.prefix_token_ids)
        stopped = (
            not interrupted and bool(request.stop_token_ids) and self._answer_length(request) <= request.max_tokens
        )
        return GenerationResult(
            token_ids=_made_up_tokens(request, num_tokens, self._vocabulary, stopped=stopped),
            logprobs=[self._logprob] * num_tokens,
            version_spans=_spans(answer.versions, end),
            finish_reason="interrupted" if interrupted else "stop" if stopped else "length",
            started_s=answer.started_s,
        )

    def _check_alive(self) -> None:
        if not self._alive:
            raise EngineDiedError("the engine is not running")


def _made_up_tokens(request: GenerationRequest, num_tokens: int, vocabulary: int, *, stopped: bool) -> list[int]:
    """Drawn by the request's seed; a stop token stands at the end, if it was reached, and nowhere else."""
    draws = random.Random(request.seed)
    token_ids: list[int] = []
    while len(token_ids) < num_tokens:
        token = draws.randrange(vocabulary)
        if token not in request.stop_token_ids:
            token_ids.append(token)
    if stopped:
        token_ids[-1] = request.stop_token_ids[0]
    return token_ids


def _spans(versions: list[tuple[int, int]], num_tokens: int) -> list[tuple[int, int]]:
    """(weight version, number of tokens) from (weight version, tokens there when it began)."""
    ends = [first for _, first in versions[1:]] + [num_tokens] * bool(versions)
    spans: list[tuple[int, int]] = []
    for (version, first), end in zip(versions, ends, strict=True):
        if end > first and spans and spans[-1][0] == version:
            spans[-1] = (version, spans[-1][1] + end - first)
        elif end > first:
            spans.append((version, end - first))
    return spans
