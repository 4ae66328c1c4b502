"""What vLLM says about each of its steps, and what we keep of it."""

import logging
import time
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import PrometheusStatLogger

from generator_svc.interruptions import InterruptionMeter
from generator_svc.step_latencies import StepLatencies

logger = logging.getLogger(__name__)


class StepRecorder(PrometheusStatLogger):  # type: ignore[misc]
    """Takes the place of vLLM's own statistics for Prometheus, which would cost more than what is done here."""

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:  # noqa: ARG002
        self.running = 0
        """Sequences inside the engine that have begun, after the last step."""
        self.latencies = StepLatencies()
        self._cache = vllm_config.cache_config
        self._held_tokens = 0.0
        self._interruptions = InterruptionMeter()
        self._resumed_s = time.monotonic()

    def note_stop(self) -> None:
        """Drawing stops."""
        self._interruptions.stopped(time.monotonic(), self.running)

    def note_resume(self) -> None:
        """Drawing goes on. Steps that began before now were interrupted by a pause and say nothing of latencies."""
        self._resumed_s = time.monotonic()
        self._interruptions.resumed(self._resumed_s)

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        """Called by vLLM after each step."""
        # The cache after a step lacks what ended in it, the cache before lacks what joined.
        held_before, self._held_tokens = self._held_tokens, self._held_after(scheduler_stats)
        if scheduler_stats is not None:
            self.running = scheduler_stats.num_running_reqs
        # Seconds since their last token, of all sequences that got a token in this step and were not in their first.
        intervals = iteration_stats.inter_token_latencies_iter if iteration_stats is not None else ()
        if not intervals:
            return
        now_s = time.monotonic()
        if (step_s := min(intervals)) < now_s - self._resumed_s:
            self.latencies.add(len(intervals), step_s, held_tokens=max(held_before, self._held_tokens))
        if (interruption := self._interruptions.step(intervals, now_s)) is not None:
            logger.info("%s", interruption)

    def _held_after(self, scheduler_stats: Any) -> float:
        """In the cache's blocks that are in use, the last one of each sequence taken to be half full."""
        if scheduler_stats is None:
            return self._held_tokens
        block_size, running = self._cache.block_size, scheduler_stats.num_running_reqs
        in_blocks = scheduler_stats.kv_cache_usage * (self._cache.num_gpu_blocks or 0) * block_size
        return max(float(in_blocks - running * (block_size - 1) / 2), 0.0)

    def log_engine_initialized(self) -> None:
        pass
