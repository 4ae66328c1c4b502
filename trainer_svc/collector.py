"""Takes rollouts from topic `rollouts` in a thread, and hands trainable samples to the training thread.

The decisions are in trainer_svc/acceptance.py. Here are the lock around them, the wake-up of who waits, what goes to
the scheduler and to `dead-letters`, and the position from which everything unfinished could be read again. Rewards are
computed elsewhere, many at once, and outside of the lock: a slow one holds up its own sample only.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from streamrl.errors import RecordError
from streamrl.identity import BatchKey, SampleKey
from streamrl.kafka.reader import Record
from streamrl.v1.scheduler_pb2 import AbandonedSample, SampleOutcome
from trainer_svc.acceptance import Acceptance, Verdict, parse_rollout
from trainer_svc.batch_intake import BatchIntake, Intake, PromptOfGroup
from trainer_svc.reward_input import RewardError
from trainer_svc.rewards import RewardScore
from trainer_svc.rollout_counts import RolloutCounts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an open batch is."""

    resolved: int
    expected: int
    being_scored: int = 0
    """Have come, and wait for their reward."""

    def __str__(self) -> str:
        scored = f", {self.being_scored} wait for their reward" if self.being_scored else ""
        return f"{self.resolved} of {self.expected}{scored}"


Score = Callable[[Any, Sequence[int], bool], "Future[RewardScore]"]
"""Has an answer scored: prompt, token ids, whether it is truncated. The result may raise RewardError."""


class Collector:
    """The open batches, shared between the thread that reads rollouts and the one that trains on them."""

    def __init__(
        self,
        acceptance: Acceptance,
        *,
        score: Score,
        report: Callable[[SampleOutcome], None],
        dead_letter: Callable[[Record, str], None],
        refill: Callable[[BatchKey], None],
    ) -> None:
        """
        Args:
            report: what became of a sample, for the scheduler.
            dead_letter: a record that could not be handled, and why.
            refill: one more prompt is wanted for a batch; brings it by `extend`.
        """
        self._acceptance = acceptance
        self._score = score
        self._report = report
        self._dead_letter = dead_letter
        self._refill = refill
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._positions: dict[int, int] = {}
        self._there_before: Mapping[int, int] = {}
        self._first_seen: dict[BatchKey, dict[int, int]] = {}
        self._last_resolved_s = time.monotonic()
        self._early: list[Verdict] = []
        """Of answers that an earlier attempt left to prompts that were asked for just now."""

    # What the reader's and the reporter's threads call.

    def on_records(self, records: Iterable[Record]) -> None:
        """Takes records as they were read. Never raises: an error ends the wait of who waits."""
        try:
            for record in records:
                self._on_record(record)
                self._after_outcomes()
            with self._changed:
                self._changed.notify_all()
        except Exception as error:  # the edge of the reader's thread: whoever waits must learn of it
            self.fail(error)

    def on_abandoned(self, samples: Iterable[AbandonedSample]) -> None:
        """The scheduler gave these up. Never raises, as `on_records`."""
        try:
            for sample in samples:
                self._on_abandoned(SampleKey.from_proto(sample.id), sample.reason)
                self._after_outcomes()
        except Exception as error:  # the edge of the reporter's thread
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Something that training needs has ended: the first such error is raised by who waits here."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    # What the training thread calls.

    def check(self) -> None:
        """Raises the error that was handed to `fail`, if any."""
        with self._changed:
            self._raise_error()

    def begin(self, positions: Mapping[int, int | None], there: Mapping[int, int]) -> None:
        """Before anything is read.

        Args:
            positions: partition to the first offset that will be read; None: the beginning.
            there: partition to the offset below which records were there before this attempt.
        """
        with self._changed:
            self._positions = {partition: offset or 0 for partition, offset in positions.items()}
            self._there_before = there

    def wait_read(self, ends: Mapping[int, int], patience_s: float) -> bool:
        """Waits until everything below these offsets has been read, and what is of use of it scored. False when nothing
        came for `patience_s`; a reward is waited for as long as it takes."""
        with self._changed:
            while any(self._positions.get(partition, 0) < end for partition, end in ends.items()):
                self._raise_error()
                if not self._changed.wait(patience_s):
                    return False
            while any(self._acceptance.batch(key).unscored for key in self._acceptance.open_batches()):
                self._raise_error()
                self._changed.wait()
            return True

    def open(self, key: BatchKey, prompts: Sequence[PromptOfGroup], samples_per_prompt: int) -> None:
        """Expects a batch; call it before its prompts are written."""
        with self._changed:
            self._acceptance.open(key, prompts, samples_per_prompt)

    def extend(self, key: BatchKey, prompt: PromptOfGroup) -> None:
        """Expects one more group of a batch; call it before its prompt is written."""
        with self._changed:
            # Followed when the prompt has been written: what comes of them may ask for the next one.
            self._early += self._acceptance.extend(key, prompt)
            self._progressed()

    def take(self, key: BatchKey, enough: Callable[[BatchIntake], bool] | None, timeout_s: float) -> Intake | None:
        """What came of a batch and was not taken yet, as soon as it is enough or the batch is complete.

        Args:
            enough: None: only a complete batch is.

        Returns:
            None after `timeout_s`.

        Raises:
            whatever was handed to `fail`.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._raise_error()
                batch = self._acceptance.batch(key)
                if batch.complete or (enough is not None and enough(batch)):
                    return batch.take()
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self._changed.wait(remaining):
                    return None

    def cut(self, key: BatchKey) -> int:
        """Ends the wait for a batch: it is settled with what has come.

        Returns:
            How many samples it goes without.
        """
        with self._changed:
            batch = self._acceptance.batch(key)
            before = batch.num_resolved
            self._acceptance.cut(key)
            num_cut = batch.num_resolved - before
            self._progressed()
        self._after_outcomes()
        return num_cut

    def wait_complete(self, key: BatchKey, timeout_s: float) -> bool:
        """Waits until every sample of a batch has an outcome. False after `timeout_s`. Raises as `take`."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._acceptance.batch(key).complete, timeout_s)
            self._raise_error()
            return self._acceptance.batch(key).complete

    def close(self, key: BatchKey) -> BatchIntake:
        """Ends a complete batch and returns all about it."""
        with self._changed:
            self._first_seen.pop(key, None)
            return self._acceptance.close(key)

    # What anyone may ask.

    def progress(self, key: BatchKey) -> Progress:
        with self._changed:
            batch = self._acceptance.batch(key)
            return Progress(batch.num_resolved, batch.num_samples, len(batch.unscored))

    def waiting_rollouts(self) -> int:
        """Samples of open batches that arrived; those that training has begun with included."""
        with self._changed:
            return sum(len(self._acceptance.batch(key).answers) for key in self._acceptance.open_batches())

    def counts(self) -> RolloutCounts:
        """Of the closed training batches."""
        with self._changed:
            return self._acceptance.counts

    def refused_attempts(self) -> int:
        """Rollouts that processes of earlier attempts wrote after this one had begun."""
        with self._changed:
            return self._acceptance.refused_attempts

    def reused_and_forgotten(self) -> tuple[int, int]:
        """Rollouts of earlier attempts that were taken, and those with a token of a forgotten version."""
        with self._changed:
            return self._acceptance.reused, self._acceptance.forgotten

    def is_complete(self, key: BatchKey) -> bool:
        """Whether every sample of an open batch has an outcome."""
        with self._changed:
            return self._acceptance.batch(key).complete

    def known_outcomes(self) -> tuple[list[SampleOutcome], list[BatchKey]]:
        """All outcomes of open batches, and the closed batches: for a scheduler that has forgotten them."""
        with self._changed:
            return self._acceptance.open_outcomes(), self._acceptance.closed_batches()

    def resume_positions(self) -> dict[int, int]:
        """The frontier: for each partition, the first offset that holds anything of an unfinished batch, or the next
        one to read."""
        with self._changed:
            positions = dict(self._positions)
            for first_seen in self._first_seen.values():
                for partition, offset in first_seen.items():
                    positions[partition] = min(positions[partition], offset)
            return positions

    def seconds_since_progress(self) -> float:
        """Since a sample last got an outcome, or since the start."""
        with self._changed:
            return time.monotonic() - self._last_resolved_s

    def _on_record(self, record: Record) -> None:
        verdict, reason = Verdict(None), ""
        with self._changed:
            self._positions[record.partition] = record.offset + 1
            was_there = record.offset < self._there_before.get(record.partition, 0)
            try:
                rollout = parse_rollout(record.value)
            except RecordError as error:
                # What was there before was put aside before.
                reason = "" if was_there else str(error)
            else:
                verdict = self._acceptance.offer(rollout, was_there=was_there)
                reason = verdict.dead_letter
                key = SampleKey.from_proto(rollout.id).batch_key
                if key in self._acceptance.open_batches():
                    self._first_seen.setdefault(key, {}).setdefault(record.partition, record.offset)
            if verdict.outcome is not None or verdict.unscored is not None:
                self._progressed()
        if reason:
            self._dead_letter(record, reason)
        self._follow(verdict)

    def _follow(self, verdict: Verdict) -> None:
        """Has an answer scored, or tells the scheduler what became of it. Not under the lock."""
        if verdict.outcome is not None:
            logger.debug("sample %s %s", SampleKey.from_proto(verdict.outcome.id), verdict.outcome.outcome)
            self._report(verdict.outcome)
        if verdict.unscored is not None:
            unscored = verdict.unscored
            future = self._score(unscored.prompt, unscored.token_ids, unscored.truncated)
            future.add_done_callback(partial(self._on_scored, unscored.key))

    def _on_scored(self, key: SampleKey, score: "Future[RewardScore]") -> None:
        """Takes a reward, in whatever thread had it last. Never raises, as `on_records`."""
        try:
            reward: float | RewardError = score.result().total
        except RewardError as error:
            reward = error
        except CancelledError:
            return  # the run is over
        except Exception as error:  # the edge of that thread
            self.fail(error)
            return
        try:
            with self._changed:
                outcome = self._acceptance.scored(key, reward)
                self._progressed()
            if outcome is not None:
                self._report(outcome)
            self._after_outcomes()
        except Exception as error:  # the edge of that thread
            self.fail(error)

    def _on_abandoned(self, key: SampleKey, reason: str) -> None:
        with self._changed:
            outcome = self._acceptance.abandon(key, reason)
            if outcome is not None:
                logger.warning("sample %s was given up: %s", key, reason)
                self._progressed()
        if outcome is not None:
            self._report(outcome)

    def _after_outcomes(self) -> None:
        """What follows from outcomes beside their report: samples that are cut off, prompts that are wanted."""
        with self._changed:
            cut = self._acceptance.take_cut()
        for outcome in cut:
            self._report(outcome)
        # Not under the lock: whoever brings a prompt has a lock of its own, and calls `extend` under it.
        while True:
            with self._changed:
                wanted = self._acceptance.take_wanted_refills()
            if not wanted:
                return
            for key in wanted:
                self._refill(key)
            with self._changed:
                early, self._early = self._early, []
            for verdict in early:
                self._follow(verdict)

    def _progressed(self) -> None:
        self._last_resolved_s = time.monotonic()
        self._changed.notify_all()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
