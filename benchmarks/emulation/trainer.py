"""trainer_svc on emulated devices: all of it is real but the learner, whose passes take the time that they would take
there, and the rewards, which are 0. Every sample has a pass: the settings give the loss a KL term.
"""

import asyncio
import math
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.emulation.plan import STEPS_FILE, Emulation, TrainedStep
from benchmarks.emulation.stages import PREPARE_SHARE
from streamrl import service
from streamrl.v1.weights_pb2 import ModelFile
from trainer_svc import resumption
from trainer_svc.adapters import WeightForm
from trainer_svc.control import TrainerControl
from trainer_svc.data import Prompt
from trainer_svc.leader import lead
from trainer_svc.learner import Learner
from trainer_svc.main import serve
from trainer_svc.microbatches import TrainSample
from trainer_svc.model_cache import default_cache_folder
from trainer_svc.models import resolve_model
from trainer_svc.policy import StepStats
from trainer_svc.preflight import check
from trainer_svc.rewards import RewardScore
from trainer_svc.settings import TrainerSettings
from trainer_svc.task import Task, load_task


class Arrivals:
    """Counts training samples as they come."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = threading.Condition()

    def add(self) -> None:
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._count >= count)


@dataclass(frozen=True)
class EmulatedTask(Task):
    """Prompts, and rewards of 0."""

    arrivals: Arrivals

    def score(self, prompt: Prompt, token_ids: Sequence[int], truncated: bool) -> "Future[RewardScore]":
        """At once."""
        del token_ids, truncated
        if prompt.id != self.prompts.evaluation[0].id:
            self.arrivals.add()
        result: Future[RewardScore] = Future()
        result.set_result(RewardScore(0.0, {}))
        return result


class EmulatedLearner(Learner):
    """The learner's verbs; each takes as long as it would on the devices."""

    def __init__(
        self,
        emulation: Emulation,
        tensors: Sequence[tuple[str, Tensor]],
        folder: Path,
        arrivals: Arrivals,
        settings: TrainerSettings,
    ) -> None:
        """
        Args:
            tensors: what is published.
            folder: of the run.
        """
        self._emulation = emulation
        self._tensors = list(tensors)
        self._steps = (folder / STEPS_FILE).open("a", buffering=1)
        self._arrivals = arrivals
        self._batch_size = settings.data.prompts_per_batch * settings.data.samples_per_prompt
        self._num_iterations = settings.trainer.num_iterations
        self._busy_s = 0.0
        self._num_steps = self._num_tokens = 0

    def prepare(self, samples: Sequence[TrainSample]) -> list[TrainSample]:
        """The reference's pass."""
        self._pass(samples, PREPARE_SHARE)
        return list(samples)

    def accumulate(self, samples: Sequence[TrainSample]) -> None:
        """The policy's pass."""
        self._pass(samples, 1 - PREPARE_SHARE)
        self._num_tokens += sum(sample.num_tokens for sample in samples)

    def step(self, global_count: float) -> StepStats:
        """Notes when it was."""
        del global_count
        self._num_steps += 1
        trained = TrainedStep(time_s=time.time(), busy_s=self._busy_s, num_tokens=self._num_tokens)
        self._steps.write(trained.model_dump_json() + "\n")
        self._num_tokens = 0
        numbers: dict[str, Any] = dict.fromkeys((field.name for field in fields(StepStats)), 0)
        return StepStats(**{**numbers, "applied": True, "step": self._num_steps, "reference_kl": 0.0})

    def weights(self, form: WeightForm = "merged") -> list[tuple[str, Tensor]]:
        """A small model's: moving them is real, loading them takes what the emulation says."""
        del form
        if self._emulation.global_barrier and self._num_steps > 0:
            batches = min(self._num_steps + 1, self._num_iterations)
            self._arrivals.wait_for(batches * self._batch_size)
        return self._tensors

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Of canaries: what the fake engine says, too."""
        logprob = -math.log(self._tensors[0][1].shape[0])
        return [[logprob] * (len(sequence) - 1) for sequence in sequences]

    def save(self, folder: Path, *, attempt: int, iteration: int, state: Mapping[str, Any], keep: int) -> Path:
        """Nothing is resumed."""
        del attempt, iteration, state, keep
        return folder

    def idle(self) -> None: ...

    def end(self) -> None: ...

    def _pass(self, samples: Sequence[TrainSample], share: float) -> None:
        seconds = share * self._emulation.train_token_s * sum(sample.num_tokens for sample in samples)
        self._busy_s += seconds
        time.sleep(seconds / self._emulation.speed)


def _train(settings: TrainerSettings, control: TrainerControl, instance: str) -> None:
    model = resolve_model(
        settings.model.path, dtype=settings.model.dtype, seed=settings.run.seed, cache_folder=default_cache_folder()
    )
    arrivals, task = Arrivals(), load_task(settings, model)
    emulated = EmulatedTask(task.prompts, task.rewards, task.tokenizer, task.stop_token_ids, arrivals)
    learner = EmulatedLearner(
        Emulation.of(settings.run),
        [(name, tensor.detach()) for name, tensor in model.load_model().state_dict().items()],
        settings.run.folder,
        arrivals,
        settings,
    )
    files = [ModelFile(name=name, content=content) for name, content in model.files.items()]
    begun = resumption.begin(settings, task.prompts.train, None)
    try:
        lead(settings, instance, control, learner, emulated, files, *begun)
    finally:
        task.rewards.close()


async def _serve(settings: TrainerSettings, instance: str, stop: asyncio.Event) -> None:
    await serve(settings, instance, stop, _train)


SERVICE = service.Service("trainer_svc", TrainerSettings, _serve, check)
