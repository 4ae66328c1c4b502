"""Writes topic `prompts`: the prompts of each batch, closed by a count, at most max_staleness + 1 batches ahead.

A batch is opened (expected) before it is written: an attempt that takes a run up again opens what is under way, takes
what the topics still hold of it, and writes no prompts of a batch of which every answer was there. One that was written
may get further prompts (a refill), each closed by a higher count. Which prompts may be drawn is
trainer_svc/prompt_selection.py's decision, which learns from the batches that are over.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from streamrl.identity import PURPOSE_EVALUATION, PURPOSE_TRAIN, BatchKey
from streamrl.kafka.producer import RecordProducer
from streamrl.v1.records_pb2 import BatchEnd, Prompt, PromptRecord, RunEnd
from streamrl.v1.sample_pb2 import SamplingSettings
from trainer_svc.prompt_cursor import CursorState, draw, refill_order
from trainer_svc.prompt_selection import Selection, SelectionRules


class DrawnPrompt(Protocol):
    """A prompt as the data gives it; its answer key stays here."""

    @property
    def id(self) -> str:
        """Stable across epochs."""

    @property
    def token_ids(self) -> Sequence[int]: ...


OpenBatch = Callable[[BatchKey, Sequence[DrawnPrompt], int], None]
"""Told of a batch (key, prompts, samples a prompt) before its prompts are written."""

ExtendBatch = Callable[[BatchKey, DrawnPrompt], None]
"""Told of one more prompt of an open batch before it is written."""

IsComplete = Callable[[BatchKey], bool]
"""Whether nothing is left to generate of an open batch."""


@dataclass(frozen=True)
class BatchShape:
    """How much is asked for."""

    prompts_per_batch: int
    samples_per_prompt: int
    num_iterations: int
    max_staleness: int


@dataclass(slots=True)
class _Asked:
    """What is asked of a batch."""

    prompts: list[DrawnPrompt]
    num_samples: int
    """Of each prompt."""
    sampling: SamplingSettings
    written: bool = False
    indices: list[int] = field(default_factory=list)
    """Of training prompts, those that came in place of others included."""
    refills: Iterator[int] = field(default_factory=lambda: iter(()))
    """Of prompts to come in place of others, without end."""


class PromptWriter:
    """The trainer's end of topic `prompts`. Thread-safe."""

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
        extend_batch: ExtendBatch,
        is_complete: IsComplete,
        first_batch: int = 0,
        selection: Selection | None = None,
    ) -> None:
        """
        Args:
            prompts: all training prompts.
            selection: of prompts by what batches have shown; None: all may always be drawn.
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
        self._extend_batch = extend_batch
        self._is_complete = is_complete
        self._next_batch = first_batch
        self._selection = selection or Selection(SelectionRules(delay=shape.max_staleness + 1))
        self._cursors: dict[int, CursorState] = {}
        self._asked: dict[BatchKey, _Asked] = {}
        self._ended = False
        self._lock = threading.RLock()

    def open_ahead(self, iteration: int) -> None:
        """Opens the batches that may be under way while batch `iteration` is trained; earlier ones are over."""
        with self._lock:
            self._asked = {key: asked for key, asked in self._asked.items() if not _is_over(key, iteration)}
            last = min(iteration + self._shape.max_staleness, self._shape.num_iterations - 1)
            while self._next_batch <= last:
                self._cursors[self._next_batch] = self._cursor
                allowed = self._allowed(self._next_batch)
                indices, self._cursor = draw(self._cursor, self._shape.prompts_per_batch, allowed)
                asked = _Asked(
                    [self._prompts[index] for index in indices],
                    self._shape.samples_per_prompt,
                    self._sampling,
                    indices=list(indices),
                    refills=self._refills(self._next_batch, indices, allowed),
                )
                self._open(BatchKey(PURPOSE_TRAIN, self._next_batch), asked)
                self._next_batch += 1

    def write_ahead(self, iteration: int) -> None:
        """Opens them, and writes what is not written yet."""
        with self._lock:
            self.open_ahead(iteration)
            for key in self._asked:
                if not key.is_evaluation:
                    self.write(key)

    def open_evaluation(self, weight_version: int, prompts: Sequence[DrawnPrompt]) -> BatchKey:
        """Opens the evaluation of a version: one greedy answer to each prompt."""
        key = BatchKey(PURPOSE_EVALUATION, weight_version)
        with self._lock:
            self._open(key, _Asked(list(prompts), 1, self._greedy))
        return key

    def write(self, key: BatchKey) -> None:
        """Writes the prompts of an open batch, once, and not at all when every answer is there."""
        with self._lock:
            # Evaluations get no further prompts.
            asked = self._asked.pop(key, None) if key.is_evaluation else self._asked.get(key)
            if asked is None or asked.written or self._is_complete(key):
                return
            asked.written = True
            self._write(key, asked, first_group=0)

    def refill(self, key: BatchKey) -> None:
        """Asks for one more prompt of an open training batch."""
        with self._lock:
            asked = self._asked[key]
            index = next(asked.refills)
            prompt = self._prompts[index]
            asked.indices.append(index)
            self._extend_batch(key, prompt)
            asked.prompts.append(prompt)
            if asked.written and not self._ended:
                self._write(key, asked, first_group=len(asked.prompts) - 1)

    def observe(self, key: BatchKey, rewards: Sequence[Sequence[float]]) -> None:
        """Learns from a training batch that is over which prompts later ones may have. Call it for each, in order.

        Args:
            rewards: of the answers to each of its prompts.
        """
        with self._lock:
            groups = zip(self._asked[key].indices, rewards, strict=True)
            # Where answers are missing, the others do not say how hard the prompt is.
            whole = [(index, of_group) for index, of_group in groups if len(of_group) == self._shape.samples_per_prompt]
            self._selection.observe(key.batch, whole)

    def figures(self) -> dict[str, float]:
        """Of the data, as the newest batch was drawn from it."""
        with self._lock:
            passes = self._cursor.epoch + self._cursor.position / self._cursor.num_prompts
            return {"data/epoch": passes, **self._selection.figures(self._next_batch - 1)}

    def selection_state(self) -> dict[str, Any]:
        """What the batches that are over have shown, for a checkpoint."""
        with self._lock:
            return self._selection.state.to_json()

    def end_run(self) -> None:
        """No further prompts will be written, refills of what is under way included."""
        with self._lock:
            self._ended = True
            self._send(PromptRecord(run_end=RunEnd()))

    def cursor_before(self, batch: int) -> CursorState:
        """What a batch was, or would be, drawn from; batches before it are forgotten."""
        with self._lock:
            self._cursors = {drawn: cursor for drawn, cursor in self._cursors.items() if drawn >= batch}
            return self._cursors.get(batch, self._cursor)

    def _open(self, key: BatchKey, asked: "_Asked") -> None:
        self._open_batch(key, asked.prompts, asked.num_samples)
        self._asked[key] = asked

    def _allowed(self, batch: int) -> npt.NDArray[np.bool_] | None:
        return self._selection.allowed(batch, self._shape.prompts_per_batch, len(self._prompts))

    def _refills(self, batch: int, drawn: Sequence[int], allowed: npt.NDArray[np.bool_] | None) -> Iterator[int]:
        order = refill_order(self._cursor, batch, drawn, allowed)
        while True:
            yield from order

    def _write(self, key: BatchKey, asked: "_Asked", *, first_group: int) -> None:
        """The prompts from that group on, closed by the count of all."""
        for group, prompt in enumerate(asked.prompts[first_group:], start=first_group):
            self._send(
                PromptRecord(
                    prompt=Prompt(
                        purpose=key.purpose,  # type: ignore[arg-type]
                        batch=key.batch,
                        group=group,
                        prompt_id=prompt.id,
                        token_ids=prompt.token_ids,
                        sampling=asked.sampling,
                        num_samples=asked.num_samples,
                    )
                )
            )
        end = BatchEnd(purpose=key.purpose, batch=key.batch, num_groups=len(asked.prompts))  # type: ignore[arg-type]
        self._send(PromptRecord(batch_end=end))

    def _send(self, record: PromptRecord) -> None:
        record.attempt = self._attempt
        self._producer.send(self._topic, record.SerializeToString(), partition=0)


def _is_over(key: BatchKey, iteration: int) -> bool:
    return not key.is_evaluation and key.batch < iteration
