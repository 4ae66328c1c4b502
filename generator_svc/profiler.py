"""How fast an engine is: measured with made-up requests, in a few seconds, before an instance registers.

Steps are timed at several batch sizes with short contexts, then at one with long contexts, which says what a token in
the cache costs; and a long prompt by itself. It is the engine's own figures that are read (`Engine.step_latencies`),
those that heartbeats keep current later. What it leaves out: other load on the machine, and engines that share it.
"""

import asyncio
import logging
import random
from collections.abc import Sequence
from pathlib import Path

from generator_svc.engine import Engine, GenerationRequest
from generator_svc.sample import ModelLimits
from generator_svc.step_latencies import StepSpeed
from streamrl.engine_profile import from_file
from streamrl.v1.scheduler_pb2 import EngineProfile, StepLatency

logger = logging.getLogger(__name__)

_SHORT_PROMPT = 8
"""Tokens; fewer where the model takes very few."""
_FEWEST_STEPS, _MOST_STEPS = 8, 64
_LONGEST_CONTEXT = 2048
_LOOK_S = 0.005
_NOISE = 0.03
"""Longer contexts must slow a step down by more than this share of it: less is noise."""


class Profiler:
    """Measures one engine that has nothing else to do."""

    def __init__(self, engine: Engine, limits: ModelLimits, seconds: float) -> None:
        """
        Args:
            seconds: about how long it may take.
        """
        self._engine = engine
        self._limits = limits
        self._seconds, self._round_s = seconds, seconds / 6
        self._short_prompt = max(1, min(_SHORT_PROMPT, limits.max_model_len // 4))
        self._most_steps = max(1, min(_MOST_STEPS, limits.max_model_len // 2))
        self._draws = random.Random(0)
        self._count = 0

    async def measure(self) -> EngineProfile:
        """
        Raises:
            ValueError: the engine does not take such requests, or does not say how its steps are.
            EngineDiedError: as the engine.
        """
        size = self._engine.max_running
        until_s = self._now_s() + self._seconds
        # The first steps of an engine are slow: they say how many there is time for.
        await self._run(1, self._short_prompt, min(_FEWEST_STEPS, self._most_steps))
        measured: dict[int, StepSpeed] = {}
        for batch_size in [1, size, *(2**bits for bits in range(2, size.bit_length(), 2) if 2**bits < size)]:
            if batch_size not in measured and (batch_size in (1, size) or self._now_s() < until_s):
                last_s = max((speed.latency_s for speed in measured.values()), default=0.0)
                measured[batch_size] = await self._run(batch_size, self._short_prompt, self._num_steps(last_s))
        prefill_token_s = await self._prefill(measured[1].latency_s)
        held_token_s = await self._held(measured[size], prefill_token_s)
        logger.info(
            "measured: a step takes %.4g s alone and %.4g s with %d sequences, a token of a prompt %.3g s, one in the "
            "cache %.3g s",
            measured[1].latency_s,
            measured[size].latency_s,
            size,
            prefill_token_s,
            held_token_s,
        )
        return EngineProfile(
            steps=[StepLatency(**measured[batch_size]._asdict()) for batch_size in sorted(measured)],
            held_token_s=held_token_s,
            prefill_token_s=prefill_token_s,
        )

    def _num_steps(self, step_s: float) -> int:
        affordable = int(self._round_s / step_s) if step_s else _MOST_STEPS
        return min(max(_FEWEST_STEPS, affordable), self._most_steps)

    async def _prefill(self, step_s: float) -> float:
        """Seconds of a token of a prompt."""
        context = self._context(tokens=self._limits.max_model_len)
        started_s = self._now_s()
        await self._draw(1, context, 1)
        return max((self._now_s() - started_s - step_s) / context, 0.0)

    async def _held(self, short: StepSpeed, prefill_token_s: float) -> float:
        """Seconds that a token in the cache adds to a step: full batches with long contexts against short ones."""
        size = self._engine.max_running
        # The prompts themselves must not take long either.
        affordable = 2 * self._round_s / max(prefill_token_s, 1e-9)
        context = self._context(tokens=min(self._engine.kv_cache_tokens / 2, affordable) / size)
        long = await self._run(size, context, self._num_steps(short.latency_s))
        more_held, slower_s = long.held_tokens - short.held_tokens, long.latency_s - short.latency_s
        return slower_s / more_held if more_held > 0 and slower_s > _NOISE * short.latency_s else 0.0

    def _context(self, tokens: float) -> int:
        longest = min(self._limits.max_model_len - self._most_steps - 1, _LONGEST_CONTEXT)
        return int(max(self._short_prompt, min(tokens, longest)))

    async def _run(self, batch_size: int, prompt_tokens: int, num_steps: int) -> StepSpeed:
        """The steps of full batches; those in which prompts are computed too take longer, and are left out where others
        follow."""
        self._engine.step_latencies()
        drawing = asyncio.create_task(self._draw(batch_size, prompt_tokens, num_steps))
        try:
            while not drawing.done() and len(self._engine.progress()) < batch_size:
                await asyncio.wait({drawing}, timeout=_LOOK_S)
            with_prompts = self._engine.step_latencies()
            await drawing
        finally:
            drawing.cancel()
        speeds = self._engine.step_latencies() or with_prompts
        if not speeds:
            raise ValueError(f"the engine says nothing of steps with {batch_size} sequences")
        return max(speeds, key=lambda speed: speed.batch_size)._replace(batch_size=batch_size)

    async def _draw(self, batch_size: int, prompt_tokens: int, num_steps: int) -> None:
        await asyncio.gather(
            *(self._engine.generate(self._request(prompt_tokens, num_steps)) for _ in range(batch_size))
        )

    def _request(self, prompt_tokens: int, num_steps: int) -> GenerationRequest:
        self._count += 1
        return GenerationRequest(
            request_id=f"profile-{self._count}",
            # Different ones, so that none is found in the cache.
            prompt_token_ids=self._tokens(prompt_tokens),
            temperature=1.0,
            max_tokens=num_steps,
            stop_token_ids=[],
            seed=self._count,
            priority=0,
            # A trained model may have nothing to say to made-up prompts.
            to_the_end=True,
        )

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()

    def _tokens(self, count: int) -> list[int]:
        choice: Sequence[int] = range(self._limits.vocab_size)
        return self._draws.choices(choice, k=count)


async def known_or_measured(engine: Engine, limits: ModelLimits, seconds: float) -> EngineProfile:
    """What an engine knows of its speed, else what is measured. Errors are those of `Profiler.measure`."""
    known = engine.known_profile()
    return known if known is not None else await Profiler(engine, limits, seconds).measure()


async def profile_of(
    engine: Engine, limits: ModelLimits, seconds: float, saved: Path | None = None
) -> EngineProfile | None:
    """What is known of an engine's speed, or measured; None: it was not to be, or could not be measured.

    Args:
        saved: what was measured before.

    Raises:
        ValueError: `saved` is no profile.
        EngineDiedError: as the engine.
    """
    if saved is not None:
        return from_file(saved)
    if seconds <= 0:
        return engine.known_profile()
    try:
        return await known_or_measured(engine, limits, seconds)
    except ValueError as error:
        # Work goes on without: planning has other ways to know.
        logger.warning("the engine could not be measured: %s", error)
        return None
