"""The engine as vLLM gives it: one AsyncLLM, whose weights come through our weight transfer.

vLLM runs in processes of its own (a core that schedules, and workers that compute); this is the side that asks. Besides
weight_transfer.py, which loads, and the other modules named vllm_*, nothing knows vLLM. GPUs and CPUs are alike here.
"""

import asyncio
import time
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from generator_svc.engine import GenerationRequest, GenerationResult, SwitchReport
from generator_svc.fabric_receiver import FabricReceiver
from generator_svc.prefetcher import Prefetcher
from generator_svc.step_latencies import StepSpeed
from generator_svc.vllm_settings import VllmSettings, bind_threads_of_one_process, prepare_environment
from generator_svc.weight_fetcher import FetchedVersion, WeightSource
from streamrl.errors import EngineDiedError
from streamrl.v1.scheduler_pb2 import EngineProfile
from streamrl.v1.weights_pb2 import VersionManifest

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    from generator_svc.vllm_steps import StepRecorder

Answer = TypeVar("Answer")

_BACKEND = "streamrl"
"""weight_transfer.BACKEND; that module needs torch, this one is imported without."""
_ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""By its name, which vLLM takes on CPUs too: as "uni" it starts a process all the same, for it cannot set the
environment of threads in its own. `prepare_environment` does."""
_DIED = "the inference engine died; its own lines above say why"
_NEVER_LOADED = "default"
"""vLLM's name of the weights that it began with."""
_GRACE_S = 0.5
"""Engine processes have nothing to save, and on CPUs take more than five seconds to take themselves down."""
_SCORE_PRIORITY = -(2**31)
"""Before every request for generation."""


class VllmEngine:
    """See `Engine`."""

    def __init__(self, settings: VllmSettings, source: WeightSource) -> None:
        """
        Args:
            source: where `prefetch` and `switch` take versions from.
        """
        self.max_running = settings.max_running
        self.kv_cache_tokens = 0
        self._settings = settings
        self._prefetcher = Prefetcher(source, FabricReceiver() if source.fabric else None)
        self._weight_version = -1
        self._pausing = asyncio.Lock()
        self._paused = False
        self._num_scores = 0
        self._interrupted: set[str] = set()
        """Requests whose end was asked for."""
        self._llm_or_none: AsyncLLM | None = None
        # The kernel's parent-death signal is tied to the thread that starts a process: the engine's core is started
        # by this one, which lives as long as the engine is wanted.
        self._launcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine-launcher")

    async def start(self, model_folder: Path, manifest: VersionManifest) -> SwitchReport:
        self._prefetcher.begin(manifest)
        await self.start_unloaded(model_folder)
        return await self.switch(manifest)

    async def start_unloaded(self, model_folder: Path) -> None:
        prepare_environment(self._settings)
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._launcher, self._launch, model_folder)
        except RuntimeError as error:
            raise EngineDiedError(f"the inference engine did not start: {error}") from error
        cache = self._llm.vllm_config.cache_config
        self.kv_cache_tokens = cache.num_gpu_blocks * cache.block_size
        # vLLM begins to watch its processes with the first request.
        await self.score([0, 0])

    def _launch(self, model_folder: Path) -> None:
        from vllm import AsyncEngineArgs
        from vllm.config import WeightTransferConfig
        from vllm.v1.engine.async_llm import AsyncLLM

        from generator_svc.vllm_steps import StepRecorder

        settings = self._settings
        arguments = AsyncEngineArgs(
            model=str(model_folder),
            skip_tokenizer_init=True,
            load_format="dummy",
            generation_config="vllm",
            dtype=settings.dtype,
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_running,
            tensor_parallel_size=settings.tensor_parallel_size,
            worker_cls=settings.worker_class,
            distributed_executor_backend=_ONE_PROCESS if settings.in_one_process else None,
            enforce_eager=settings.enforce_eager,
            enable_sleep_mode=settings.enable_sleep_mode,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            kv_cache_memory_bytes=None if settings.kv_cache_gib is None else int(settings.kv_cache_gib * 2**30),
            enable_prefix_caching=settings.enable_prefix_caching,
            enable_chunked_prefill=None if settings.step_tokens is None else False,
            max_num_batched_tokens=settings.step_tokens,
            scheduling_policy="priority",
            logprobs_mode="processed_logprobs",
            weight_transfer_config=WeightTransferConfig(backend=_BACKEND),
            disable_log_stats=False,
        )
        bind_threads_of_one_process(settings)
        self._llm_or_none = AsyncLLM.from_engine_args(arguments, stat_loggers=[StepRecorder])

    def sampling(self, request: GenerationRequest) -> "SamplingParams":
        """How vLLM is to draw an answer."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=request.temperature,
            max_tokens=request.max_tokens - len(request.prefix_token_ids),
            stop_token_ids=request.stop_token_ids,
            ignore_eos=request.to_the_end,
            seed=request.seed,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        sampling = self.sampling(request)
        # To vLLM the tokens that are there are part of the prompt.
        prompt_token_ids = request.prompt_token_ids + request.prefix_token_ids
        try:
            while True:
                output = await self._ask(request.request_id, prompt_token_ids, sampling, request.priority)
                answer = output.outputs[0]
                if answer.finish_reason in ("stop", "length") or request.request_id in self._interrupted:
                    break
                if answer.finish_reason != "abort":
                    raise EngineDiedError(f"vLLM ended a request with {answer.finish_reason!r}")
                # A switch has taken it back before its first token, for its cache would carry the version before.
        finally:
            self._interrupted.discard(request.request_id)
        return GenerationResult(
            token_ids=list(answer.token_ids),
            logprobs=list(answer.logprobs.logprobs) if answer.token_ids else [],
            version_spans=[(_version_of(span.version), span.end - span.start) for span in answer.weight_versions or ()],
            finish_reason="interrupted" if answer.finish_reason == "abort" else answer.finish_reason,
            # vLLM's own clock is the monotonic one.
            started_s=time.time() - (time.monotonic() - output.metrics.scheduled_ts),
        )

    async def interrupt(self, request_id: str) -> None:
        if request_id in self._llm.output_processor.external_req_ids:
            self._interrupted.add(request_id)
            await self._alive(self._llm.abort(request_id))

    def progress(self) -> dict[str, int]:
        states = self._llm.output_processor.request_states.values()
        drawn = ((state.external_req_id, state.detokenizer.num_output_tokens()) for state in states)
        return {request_id: num_tokens for request_id, num_tokens in drawn if num_tokens}

    async def score(self, token_ids: list[int]) -> list[float]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._num_scores += 1
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        output = await self._ask(f"score-{self._num_scores}", token_ids, sampling, _SCORE_PRIORITY)
        logprobs: list[float] = output.prompt_logprobs.logprobs
        return logprobs

    async def _ask(
        self, request_id: str, prompt_token_ids: list[int], sampling: "SamplingParams", priority: int
    ) -> "RequestOutput":
        """One request to vLLM, which aborts it when this is cancelled."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

        salt = str(self._weight_version) if self._settings.salt_requests else None
        prompt = tokens_input(prompt_token_ids, cache_salt=salt)
        try:
            async for output in self._llm.generate(prompt, sampling, request_id, priority=priority):
                if output.finished:
                    return output
        except EngineDeadError as error:
            raise EngineDiedError(_DIED) from error
        except VLLMClientError as error:
            raise ValueError(f"request {request_id}: {error}") from error
        raise AssertionError("vLLM ended a request without its last output")

    def prefetch(self, manifest: VersionManifest) -> None:
        self._prefetcher.begin(manifest)

    def forget_fetched(self) -> None:
        self._prefetcher.forget()

    async def switch(self, manifest: VersionManifest) -> SwitchReport:
        if self._llm.errored:
            raise EngineDiedError(_DIED)
        fetched = await self._prefetcher.take(manifest)
        # A load that has begun goes to its end, whatever becomes of the caller.
        return await asyncio.shield(asyncio.ensure_future(self._load(fetched)))

    async def _load(self, fetched: FetchedVersion) -> SwitchReport:
        manifest = fetched.manifest
        try:
            async with self._pausing:
                started = time.monotonic()
                recompute = self._settings.kv_on_swap == "recompute"
                try:
                    await self._stop_drawing(clear_cache=recompute)
                    await self._replace_weights(fetched)
                    if self._settings.salt_requests:
                        await self._take_back_requests_that_wait()
                    if not self._paused:
                        await self._draw_again()
                except Exception as error:  # whatever it was, the model may be half of each version
                    await self.stop()
                    raise EngineDiedError(f"loading version {manifest.weight_version} failed: {error}") from error
                switch_s = time.monotonic() - started
        finally:
            fetched.close()
        return SwitchReport(manifest.weight_version, manifest.digest, fetched.fetch_s, switch_s)

    async def _replace_weights(self, fetched: FetchedVersion) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        update: dict[str, object] = {
            "path": fetched.buffer.path,
            "manifest": fetched.manifest.SerializeToString(),
        }
        if fetched.adapted is not None:
            update["adapted_path"] = fetched.adapted.path
            update["adapted_manifest"] = fetched.adapted.manifest.SerializeToString()
        await self._alive(self._llm.start_weight_update())
        await self._alive(self._llm.update_weights(WeightTransferUpdateRequest(update)))
        await self._alive(self._llm.finish_weight_update(str(fetched.manifest.weight_version)))
        self._weight_version = fetched.manifest.weight_version

    async def _take_back_requests_that_wait(self) -> None:
        """Makes vLLM give back, to be asked again under the new salt, requests that have no token yet."""
        states = self._llm.output_processor.request_states
        waiting = [request_id for request_id, state in states.items() if state.is_prefilling]
        if waiting:
            await self._alive(self._llm.abort(waiting, internal=True))

    async def _stop_drawing(self, *, clear_cache: bool) -> None:
        """As `AsyncLLM.pause_generation`, without the 20 ms that it sleeps for the looks of it."""
        self._steps.note_stop()
        await self._alive(self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache))

    async def _draw_again(self) -> None:
        self._steps.note_resume()
        await self._alive(self._llm.resume_generation())

    async def _alive(self, answer: Awaitable[Answer]) -> Answer:
        """Waits for the engine's answer; vLLM leaves the question open when the engine dies."""
        asked, watch = asyncio.ensure_future(answer), self._llm.output_handler
        await asyncio.wait((asked, watch), return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            asked.cancel()
            raise EngineDiedError(_DIED)
        return await asked

    def running(self) -> int:
        return self._steps.running

    def step_latencies(self) -> list[StepSpeed]:
        return self._steps.latencies.take()

    def known_profile(self) -> EngineProfile | None:
        return None

    async def pause(self) -> None:
        async with self._pausing:
            self._paused = True
            await self._stop_drawing(clear_cache=False)

    async def resume(self) -> None:
        async with self._pausing:
            self._paused = False
            await self._draw_again()

    async def sleep(self) -> None:
        if self._settings.enable_sleep_mode:
            async with self._pausing:
                await self._alive(self._llm.sleep(level=1))

    async def wake(self) -> None:
        if self._settings.enable_sleep_mode:
            async with self._pausing:
                await self._alive(self._llm.wake_up())
                if self._paused:
                    await self._stop_drawing(clear_cache=False)

    async def died(self) -> None:
        await asyncio.wait({self._llm.output_handler})

    async def stop(self) -> None:
        llm, self._llm_or_none = self._llm_or_none, None
        self._prefetcher.close()
        if llm is not None:
            from vllm.v1.engine.exceptions import EngineDeadError

            # vLLM would leave these waiting, and take the end of its processes for an accident.
            llm.output_processor.propagate_error(EngineDeadError())
            if llm.output_handler is not None:
                llm.output_handler.cancel()
            await asyncio.get_running_loop().run_in_executor(self._launcher, llm.shutdown, _GRACE_S)
        self._launcher.shutdown(wait=False)

    @property
    def _steps(self) -> "StepRecorder":
        recorder: StepRecorder = self._llm.logger_manager.stat_loggers[0]
        return recorder

    @property
    def _llm(self) -> "AsyncLLM":
        if self._llm_or_none is None:
            raise EngineDiedError("the inference engine is not running")
        return self._llm_or_none


def _version_of(name: str) -> int:
    """A weight version; -1: weights were never loaded, as in an engine that is only measured."""
    return -1 if name == _NEVER_LOADED else int(name)
