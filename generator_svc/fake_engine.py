"""An engine without a model: continuous batching in simulated time, made-up answers, real weight fetches.

It stands in for vLLM where everything but inference is tested or measured. What it keeps true: sequences are admitted
by priority into a bounded number of places; each step gives every running sequence one token and takes as long as the
latency profile says for that many; switches interrupt and continue; every token knows its version. What it leaves out:
the cost of prompts and of recomputed caches, and any limit of the cache.
"""

import asyncio
import heapq
import itertools
import json
import math
import random
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from pathlib import Path

from generator_svc.engine import GenerationRequest, GenerationResult, SwitchReport
from generator_svc.prefetcher import Prefetcher
from generator_svc.step_latencies import StepLatencies
from generator_svc.weight_fetcher import FetchedVersion, WeightSource
from streamrl.errors import EngineDiedError
from streamrl.v1.weights_pb2 import VersionManifest

AnswerLength = Callable[[GenerationRequest], int]
"""Tokens of an answer, its stop token included; `max_tokens` cuts it."""


def log_normal_length(request: GenerationRequest) -> int:
    """Long-tailed: half of the answers have 24 tokens or fewer, one in a hundred more than 195."""
    return max(1, round(random.Random(request.seed).lognormvariate(math.log(24), 0.9)))


class LatencyProfile:
    """Seconds a step by number of running sequences: linear between the given points, constant outside."""

    def __init__(self, step_ms: Mapping[int, float]) -> None:
        points = sorted(step_ms.items())
        self._sizes = [size for size, _ in points]
        self._seconds = [milliseconds / 1000 for _, milliseconds in points]

    def __call__(self, batch_size: int) -> float:
        right = bisect_left(self._sizes, batch_size)
        if right == 0:
            return self._seconds[0]
        if right == len(self._sizes):
            return self._seconds[-1]
        left = right - 1
        share = (batch_size - self._sizes[left]) / (self._sizes[right] - self._sizes[left])
        return self._seconds[left] + share * (self._seconds[right] - self._seconds[left])


class _Sequence:
    """A request inside the engine."""

    def __init__(self, request: GenerationRequest, num_tokens: int, answer: "asyncio.Future[GenerationResult]") -> None:
        self.request = request
        self.num_tokens = num_tokens
        self.answer = answer
        self.first_step = 0
        self.started_s = 0.0
        self.versions: list[tuple[int, int]] = []
        """(weight version, tokens there when it began)."""


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
        speed: float = 1.0,
    ) -> None:
        """
        Args:
            step_ms: the latency profile, by number of running sequences.
            load_s: simulated seconds that a switch stands still.
            speed: simulated seconds in a real one.
        """
        self.max_running = max_running
        self.kv_cache_tokens = kv_cache_tokens
        self._profile = LatencyProfile(step_ms)
        self._answer_length = answer_length
        self._load_s = load_s
        self._speed = speed
        self._prefetcher = Prefetcher(source)
        self._latencies = StepLatencies()
        self._vocabulary = 2
        self._weight_version = -1
        self._alive = False
        self._stopped = asyncio.Event()
        self._paused = False
        self._loading = asyncio.Lock()
        self._order = itertools.count()
        self._waiting: list[tuple[int, int, _Sequence]] = []
        self._running: set[_Sequence] = set()
        self._endings: list[tuple[int, int, _Sequence]] = []
        # Steps since the start, the fraction of the one under way included, and the simulated time they go up to.
        self._steps = 0.0
        self._steps_up_to_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def start(self, model_folder: Path, manifest: VersionManifest) -> SwitchReport:
        config = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
        self._vocabulary = config["vocab_size"]
        self._alive = True
        self._steps_up_to_s = self._now_s()
        return await self.switch(manifest)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self._check_alive()
        self._catch_up()
        num_tokens = min(max(1, self._answer_length(request)), request.max_tokens)
        sequence = _Sequence(request, num_tokens, asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiting, (request.priority, next(self._order), sequence))
        self._go_on()
        try:
            return await sequence.answer
        except asyncio.CancelledError:
            if self._alive:
                self._catch_up()
                self._running.discard(sequence)
                self._go_on()
            raise

    async def score(self, token_ids: list[int]) -> list[float]:
        self._check_alive()
        return [self._logprob] * (len(token_ids) - 1)

    def prefetch(self, manifest: VersionManifest) -> None:
        self._prefetcher.begin(manifest)

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
                for sequence in self._running:
                    sequence.versions.append((self._weight_version, self._tokens_there(sequence)))
                self._paused = was_paused
                self._go_on()
        finally:
            fetched.buffer.close()
        return SwitchReport(manifest.weight_version, manifest.digest, fetched.fetch_s, time.monotonic() - started)

    def running(self) -> int:
        return len(self._running)

    def step_latencies(self) -> list[tuple[int, float, int]]:
        self._catch_up()
        return self._latencies.take()

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
        for sequence in (*self._running, *(sequence for _, _, sequence in self._waiting)):
            if not sequence.answer.done():
                sequence.answer.set_exception(EngineDiedError("the engine was stopped"))
        self._running.clear()
        self._waiting.clear()

    # The simulation.

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time() * self._speed

    def _stand_still(self) -> None:
        self._catch_up()
        self._paused = True
        self._set_timer(None)

    def _catch_up(self) -> None:
        """Draws all tokens that are due, one ended answer after the other: each changes how long the next step is."""
        now_s = self._now_s()
        while self._running and not self._paused:
            step_s = self._profile(len(self._running))
            end = self._next_ending()
            reached_s = min(now_s, self._steps_up_to_s + (end - self._steps) * step_s)
            num_steps = (reached_s - self._steps_up_to_s) / step_s
            self._latencies.add(len(self._running), reached_s - self._steps_up_to_s, num_steps)
            self._steps_up_to_s = reached_s
            if reached_s == now_s:
                self._steps = min(self._steps + num_steps, end)
            else:
                self._steps = float(end)
            if self._steps < end:
                return
            self._end_answers()
            self._admit()
        self._steps_up_to_s = now_s

    def _go_on(self) -> None:
        """Fills free places and sets the timer for the next answer to end."""
        if self._paused or not self._alive:
            return
        self._admit()
        if not self._running:
            self._set_timer(None)
            return
        due_s = self._steps_up_to_s + (self._next_ending() - self._steps) * self._profile(len(self._running))
        self._set_timer(due_s / self._speed)

    def _set_timer(self, due: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if due is None else asyncio.get_running_loop().call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        self._catch_up()
        self._go_on()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.max_running:
            _, order, sequence = heapq.heappop(self._waiting)
            if sequence.answer.done():
                continue
            sequence.first_step = math.ceil(self._steps)
            sequence.started_s = time.time()
            sequence.versions = [(self._weight_version, 0)]
            self._running.add(sequence)
            heapq.heappush(self._endings, (sequence.first_step + sequence.num_tokens, order, sequence))

    def _next_ending(self) -> int:
        """The step with which the next of the running answers ends."""
        while self._endings[0][2] not in self._running:
            heapq.heappop(self._endings)
        return self._endings[0][0]

    def _end_answers(self) -> None:
        while self._endings and self._endings[0][0] <= self._steps:
            _, _, sequence = heapq.heappop(self._endings)
            if sequence in self._running:
                self._running.remove(sequence)
                if not sequence.answer.done():
                    sequence.answer.set_result(self._result(sequence))

    def _tokens_there(self, sequence: _Sequence) -> int:
        return max(0, math.floor(self._steps) - sequence.first_step)

    @property
    def _logprob(self) -> float:
        """Of any token: this engine knows nothing."""
        return -math.log(self._vocabulary)

    def _result(self, sequence: _Sequence) -> GenerationResult:
        request, num_tokens = sequence.request, sequence.num_tokens
        stopped = bool(request.stop_token_ids) and self._answer_length(request) <= request.max_tokens
        return GenerationResult(
            token_ids=_made_up_tokens(request, num_tokens, self._vocabulary, stopped=stopped),
            logprobs=[self._logprob] * num_tokens,
            version_spans=_spans(sequence.versions, num_tokens),
            finish_reason="stop" if stopped else "length",
            started_s=sequence.started_s,
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
    ends = [first for _, first in versions[1:]] + [num_tokens]
    spans = [(version, end - first) for (version, first), end in zip(versions, ends, strict=True)]
    return [(version, length) for version, length in spans if length > 0]
