"""Writes topic `prompts`: the prompts of each batch, closed by a count, at most max_staleness + 1 batches ahead."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from streamrl.identity import PURPOSE_EVALUATION, PURPOSE_TRAIN, BatchKey
from streamrl.kafka.producer import RecordProducer
from streamrl.v1.records_pb2 import BatchEnd, Prompt, PromptRecord, RunEnd
from streamrl.v1.sample_pb2 import SamplingSettings
from trainer_svc.prompt_cursor import CursorState, draw


class DrawnPrompt(Protocol):
    """A prompt as the data gives it; its answer key stays here."""

    @property
    def id(self) -> str:
        """Stable across epochs."""

    @property
    def token_ids(self) -> Sequence[int]: ...


OpenBatch = Callable[[BatchKey, Sequence[DrawnPrompt], int], None]
"""Told of a batch (key, prompts, samples a prompt) before its prompts are written."""


@dataclass(frozen=True)
class BatchShape:
    """How much is asked for."""

    prompts_per_batch: int
    samples_per_prompt: int
    num_iterations: int
    max_staleness: int


class PromptWriter:
    """The trainer's end of topic `prompts`."""

    def __init__(
        self,
        producer: RecordProducer,
        topic: str,
        *,
        attempt: int,
        shape: BatchShape,
        prompts: Sequence[DrawnPrompt],
        cursor: CursorState,
        sampling: SamplingSettings,
        open_batch: OpenBatch,
        first_batch: int = 0,
    ) -> None:
        """
        Args:
            prompts: all training prompts.
            cursor: from which the first batch is drawn.
            sampling: of training; evaluation is the same but greedy.
            first_batch: the first untrained one.
        """
        self._producer = producer
        self._topic = topic
        self._attempt = attempt
        self._shape = shape
        self._prompts = prompts
        self._cursor = cursor
        self._sampling = sampling
        self._greedy = SamplingSettings()
        self._greedy.CopyFrom(sampling)
        self._greedy.temperature = 0.0
        self._open_batch = open_batch
        self._next_batch = first_batch
        self._cursors: dict[int, CursorState] = {}

    def write_ahead(self, iteration: int) -> None:
        """Writes what is not written yet of the batches that may be under way while batch `iteration` is trained."""
        last = min(iteration + self._shape.max_staleness, self._shape.num_iterations - 1)
        while self._next_batch <= last:
            self._cursors[self._next_batch] = self._cursor
            indices, self._cursor = draw(self._cursor, self._shape.prompts_per_batch)
            key = BatchKey(PURPOSE_TRAIN, self._next_batch)
            self._write(
                key, [self._prompts[index] for index in indices], self._shape.samples_per_prompt, self._sampling
            )
            self._next_batch += 1

    def write_evaluation(self, weight_version: int, prompts: Sequence[DrawnPrompt]) -> BatchKey:
        """Writes the prompts for the evaluation of a version: one greedy answer each."""
        key = BatchKey(PURPOSE_EVALUATION, weight_version)
        self._write(key, prompts, 1, self._greedy)
        return key

    def end_run(self) -> None:
        """No further prompts will be written."""
        self._send(PromptRecord(run_end=RunEnd()))

    def cursor_before(self, batch: int) -> CursorState:
        """What a batch was, or would be, drawn from; batches before it are forgotten."""
        self._cursors = {drawn: cursor for drawn, cursor in self._cursors.items() if drawn >= batch}
        return self._cursors.get(batch, self._cursor)

    def _write(
        self, key: BatchKey, prompts: Sequence[DrawnPrompt], num_samples: int, sampling: SamplingSettings
    ) -> None:
        self._open_batch(key, prompts, num_samples)
        for group, prompt in enumerate(prompts):
            self._send(
                PromptRecord(
                    prompt=Prompt(
                        purpose=key.purpose,  # type: ignore[arg-type]
                        batch=key.batch,
                        group=group,
                        prompt_id=prompt.id,
                        token_ids=prompt.token_ids,
                        sampling=sampling,
                        num_samples=num_samples,
                    )
                )
            )
        end = BatchEnd(purpose=key.purpose, batch=key.batch, num_groups=len(prompts))  # type: ignore[arg-type]
        self._send(PromptRecord(batch_end=end))

    def _send(self, record: PromptRecord) -> None:
        record.attempt = self._attempt
        self._producer.send(self._topic, record.SerializeToString(), partition=0)
