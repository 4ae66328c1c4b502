"""The life of a run as the trainer sees it: a list of verbs, the same in every mode.

What a mode changes is its pacing (trainer_svc/pacing.py); how many ranks there are is the learner's business. The loop
runs in one thread of its own; everything that can wait without it does so in others.
"""

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from streamrl.errors import NoProgressError, UnusableBatchError
from streamrl.identity import PURPOSE_TRAIN, BatchKey
from streamrl.spans import SpanLog
from streamrl.v1.scheduler_pb2 import TrainerPace
from streamrl.v1.weights_pb2 import Canary, ModelFile
from trainer_svc.answer_table import AnswerTable
from trainer_svc.batch_intake import BatchIntake, Intake
from trainer_svc.batch_training import BatchSteps, BatchTraining
from trainer_svc.collector import Collector
from trainer_svc.control import StopAskedError, TrainerControl
from trainer_svc.evaluation import Evaluations
from trainer_svc.figures import batch_figures, steps_figures
from trainer_svc.fleet_watch import FleetWatch
from trainer_svc.learner import Learner
from trainer_svc.lineage import Lineage, TrainerState
from trainer_svc.outcome_reporter import OutcomeReporter
from trainer_svc.pacing import Pacing
from trainer_svc.prompt_writer import PromptWriter
from trainer_svc.publisher import Publisher
from trainer_svc.rollout_intake import RolloutIntake
from trainer_svc.run_clock import RunClock
from trainer_svc.run_log import RunLog
from trainer_svc.snapshots import Snapshots

logger = logging.getLogger(__name__)

_LOOK_AROUND_S = 1.0
"""While the loop waits it looks so often whether anything else has happened."""
_PACES = 8
"""Iterations of which the median says how fast training is."""


@dataclass(frozen=True)
class LoopSettings:
    """The settings that the loop itself reads."""

    attempt: int
    num_iterations: int
    checkpoint_every: int
    keep_checkpoints: int
    no_progress_s: float
    """0: never given up here."""
    checkpoint_folder: Path
    batch_deadline_s: float = 0.0
    """How long a batch's answers are waited for; 0: until they are there."""


@dataclass(frozen=True)
class Parts:
    """Everything that the loop speaks to."""

    learner: Learner
    begin_batch: Callable[[int], BatchTraining]
    """Of its index."""
    pacing: Pacing
    writer: PromptWriter
    collector: Collector
    intake: RolloutIntake
    reporter: OutcomeReporter
    evaluations: Evaluations
    publisher: Publisher
    snapshots: Snapshots
    watch: FleetWatch
    run_log: RunLog
    answer_table: AnswerTable
    spans: SpanLog
    control: TrainerControl
    clock: RunClock
    dead_letters: Callable[[], int]
    """Records so far that a service could not handle."""


class TrainLoop:
    """One run, or the rest of one."""

    def __init__(
        self,
        settings: LoopSettings,
        parts: Parts,
        lineage: Lineage,
        *,
        data_digest: str,
        model_files: Sequence[ModelFile],
        canaries: Sequence[Sequence[int]],
    ) -> None:
        """
        Args:
            lineage: of the weights that the learner holds.
            data_digest: of the training prompts.
            model_files: config and tokenizer, published with the first version.
            canaries: token ids of fixed sequences, scored under every version.
        """
        self._settings = settings
        self._parts = parts
        self._lineage = lineage
        self._data_digest = data_digest
        self._model_files = model_files
        self._first_version = lineage.iteration
        self._canaries = canaries
        self._progressed_s = time.monotonic()
        self._fleet_mark: Hashable = None
        self._figures: dict[str, float] = {}
        self._paces_s: deque[float] = deque(maxlen=_PACES)
        self._saved_iteration = -1

    def run(self) -> bool:
        """Trains until the last iteration, or until the run is asked to stop.

        Returns:
            Whether all iterations are done.

        Raises:
            NoProgressError: nothing moved for `no_progress_s`.
            StreamRLError: something that training needs has ended.
        """
        parts, lineage = self._parts, self._lineage
        try:
            held_versions = self._rewind()
            self._publish()
            self._take_up(held_versions)
            self._count_time(True)
            while lineage.iteration < self._settings.num_iterations:
                self._pause_if_asked()
                self._stop_if_asked()
                parts.writer.write_ahead(lineage.iteration)
                batch, steps = self._learn()
                self._publish()
                self._log(batch, steps)
                self._evaluate_if_due()
                self._checkpoint_if_due()
            parts.publisher.wait()
            self._evaluate_and_wait()
            completed = True
        except StopAskedError:
            logger.info("stopping after iteration %d", lineage.iteration)
            completed = False
        parts.control.show("stopping")
        self._count_time(False)
        self._publication_figures()
        parts.writer.end_run()
        self._checkpoint()
        if not completed:
            # What is left is to close the log: whoever takes the run up again need not wait for it.
            parts.control.show("done")
        return completed

    # How an attempt begins.

    def _rewind(self) -> set[int]:
        """Has weights_svc forget what is not of this lineage; returns the versions that it holds."""
        if self._settings.attempt == 1:
            return set()
        self._parts.control.show_iteration(self._lineage.iteration, {})
        return self._parts.publisher.rewind(self._lineage.iteration)

    def _take_up(self, held_versions: set[int]) -> None:
        """Opens what is under way, takes what the topic holds of it, and only then tells the scheduler, which
        dispatches nothing before: what has come is not generated again."""
        parts, version = self._parts, self._lineage.iteration
        for left in parts.evaluations.left(version):
            if left == version or left in held_versions:
                parts.evaluations.open(left)
            else:
                logger.warning("version=%d is not held any more: its evaluation is left out", left)
                parts.evaluations.give_up(left)
        parts.writer.open_ahead(version)
        parts.control.show("starting", "what topic rollouts holds already")
        parts.intake.start()
        self._progressed()
        parts.reporter.start()
        parts.evaluations.ask()
        if version == 0 or parts.pacing.evaluations_block:
            self._evaluate_and_wait()

    # Verbs of an iteration.

    def _learn(self) -> tuple[BatchIntake, BatchSteps | None]:
        """What can be computed of a batch's samples as they come, then its steps."""
        parts, key = self._parts, BatchKey(PURPOSE_TRAIN, self._lineage.iteration)
        training = parts.begin_batch(key.batch)
        train_s = taken_s = 0.0
        num_tokens = 0
        deadline_s = time.monotonic() + (self._settings.batch_deadline_s or math.inf)
        intake = self._collect(key, training, deadline_s)
        parts.pacing.before_training()
        while True:
            parts.control.show("training")
            if intake.complete:
                batch = parts.collector.close(key)
                parts.writer.observe(key, batch.group_rewards())
                parts.reporter.close_batch(key)
                self._write_early(key.batch + 1)
            started_s = time.time()
            training.take(intake)
            taken_s += time.time() - started_s
            num_tokens += sum(sample.num_tokens for group in intake.groups for sample in group.trained)
            if intake.complete:
                steps = self._step(batch, training)
            parts.spans.write("train", started_s, time.time(), batch=key.batch, weight_version=key.batch)
            train_s += time.time() - started_s
            if intake.complete:
                break
            intake = self._collect(key, training, deadline_s)
        parts.clock.end_iteration()
        self._progressed()
        if parts.pacing.min_tokens is not None and num_tokens:
            self._paces_s.append(taken_s / num_tokens)
            pace_s = statistics.median(self._paces_s)
            parts.reporter.set_pace(TrainerPace(token_s=pace_s, pass_tokens=parts.pacing.min_tokens))
        self._figures = {"time/train_s": train_s}
        self._lineage.add_iteration(batch.reward_mean, batch.trained_staleness_max)
        return batch, steps

    def _write_early(self, iteration: int) -> None:
        """Writes what the next iteration will ask for while its version is made, so that it is planned by then. Where
        time that does not count, or training alone on the machine, comes first, it must not be generated yet."""
        parts = self._parts
        evaluates = parts.pacing.evaluations_block and parts.evaluations.is_due(iteration)
        asked = parts.control.paused() or parts.control.stop_asked()
        if not (parts.pacing.waits_for_publication or evaluates or asked):
            parts.writer.write_ahead(iteration)

    def _step(self, batch: BatchIntake, training: BatchTraining) -> BatchSteps | None:
        if not batch.trained:
            self._refuse_unusable(batch)
            logger.warning("%s has nothing to train on: the weights stay as they are", batch.key)
            return None
        steps = training.finish()
        if not all([*(step.applied for step in steps.policy), *(step.applied for step in steps.critic)]):
            logger.warning("%s: a gradient is not finite, and its step changed nothing", batch.key)
        return steps

    def _refuse_unusable(self, batch: BatchIntake) -> None:
        """A batch of which nothing could be generated or scored will not be the last one."""
        dropped = batch.counts.dropped
        if dropped["abandoned"] + dropped["infrastructure"] == batch.counts.expected:
            reason = next(outcome.reason for outcome in batch.outcomes.values())
            raise UnusableBatchError(
                f"not one of the {batch.counts.expected} samples of {batch.key} could be used; the first: {reason}"
            )

    def _publish(self) -> None:
        """Copies the weights out and sends them in the background."""
        parts, version = self._parts, self._lineage.iteration
        parts.control.show("publishing")
        with parts.clock.waiting():
            # At most one snapshot is unsent: the memory of a model, not of two.
            parts.publisher.wait()
        started_s = time.monotonic()
        scores = parts.learner.score(self._canaries) if self._canaries else []
        canaries = [
            Canary(token_ids=token_ids, logprobs=logprobs)
            for token_ids, logprobs in zip(self._canaries, scores, strict=True)
        ]
        files = self._model_files if version == self._first_version else ()
        snapshot = parts.snapshots.take(version, files, canaries)
        self._figures["time/snapshot_s"] = time.monotonic() - started_s
        parts.publisher.submit(snapshot)
        if parts.pacing.waits_for_publication:
            with parts.clock.waiting():
                parts.publisher.wait()
        self._progressed()
        parts.control.show_version(version)
        parts.pacing.before_generation()

    def _log(self, batch: BatchIntake, steps: BatchSteps | None) -> None:
        """The iteration's figures and some of its answers."""
        parts, version = self._parts, self._lineage.iteration
        figures = {
            **self._figures,
            **batch_figures(batch),
            **parts.writer.figures(),
            **(steps_figures(steps.policy, steps.critic) if steps is not None else {}),
            **parts.clock.iteration_figures(batch.counts.trained, batch.counts.generated_tokens),
            **parts.watch.figures(),
            **self._count_figures(),
            **self._publication_figures(),
        }
        parts.run_log.figures(version, figures)
        parts.run_log.rows(version, parts.answer_table.rows(version, batch))
        parts.control.show_iteration(version, figures)
        logger.info(
            "iteration %d of %d: reward %.3f, %d trained, %.1f samples/s, idle: trainer %.0f %%, generators %.0f %%",
            version,
            self._settings.num_iterations,
            figures.get("reward/mean", 0.0),
            batch.counts.trained,
            figures["throughput/samples_per_s"],
            100 * figures["idle/trainer"],
            100 * figures["idle/generator"],
        )

    def _evaluate_if_due(self) -> None:
        version = self._lineage.iteration
        self._take_evaluations()
        if not self._parts.evaluations.is_due(version) or version == self._settings.num_iterations:
            return
        if self._parts.pacing.evaluations_block:
            with self._parts.clock.waiting():
                self._parts.publisher.wait()
            self._evaluate_and_wait()
        else:
            self._parts.evaluations.begin(version)

    def _evaluate_and_wait(self) -> None:
        """Evaluates the present version, if it is due, and ends those under way, in time that does not count."""
        parts, version = self._parts, self._lineage.iteration
        was_counting = parts.clock.counting
        self._count_time(False)
        started_s = time.time()
        if parts.evaluations.is_due(version):
            parts.evaluations.begin(version)
        while parts.evaluations.under_way():
            parts.control.show(
                "evaluating", f"answers of {parts.evaluations.under_way()[0]}: {parts.evaluations.progress()}"
            )
            self._take_evaluations(timeout_s=_LOOK_AROUND_S)
            self._look_around()
            self._stop_if_asked()
        parts.spans.write("evaluate", started_s, time.time(), weight_version=version)
        self._count_time(was_counting)

    def _checkpoint_if_due(self) -> None:
        every, iteration = self._settings.checkpoint_every, self._lineage.iteration
        asked = self._parts.control.take_checkpoint_request()
        if asked or (every > 0 and iteration % every == 0):
            self._checkpoint()

    def _checkpoint(self) -> None:
        """Weights, optimizer and all that is needed to go on from here; once an iteration is enough."""
        parts, iteration = self._parts, self._lineage.iteration
        if iteration == self._saved_iteration:
            return
        parts.control.show("checkpointing")
        with parts.spans.span("checkpoint", weight_version=iteration):
            parts.learner.save(
                self._settings.checkpoint_folder,
                attempt=self._settings.attempt,
                iteration=iteration,
                state=self._state().to_json(),
                keep=self._settings.keep_checkpoints,
            )
        self._saved_iteration = iteration

    def _state(self) -> TrainerState:
        """All that is known of the finished iterations."""
        parts = self._parts
        busy_s, available_s = parts.watch.busy_and_available_s
        return TrainerState(
            attempt=self._settings.attempt,
            lineage=self._lineage,
            cursor=parts.writer.cursor_before(self._lineage.iteration).to_json(),
            selection=parts.writer.selection_state(),
            counts=parts.collector.counts(),
            redispatched=parts.reporter.redispatched,
            dead_letters=parts.dead_letters(),
            wall_s=parts.clock.wall_s,
            wait_s=parts.clock.wait_s,
            rollout_positions=parts.collector.resume_positions(),
            rollout_topic_id=parts.intake.topic_id,
            open_evaluations=parts.evaluations.left(self._lineage.iteration),
            data_digest=self._data_digest,
            generator_busy_s=busy_s,
            generator_available_s=available_s,
            tracker_run_id=parts.run_log.tracker_run_id,
            unlogged=parts.run_log.unlogged(),
        )

    # Waiting.

    def _collect(self, key: BatchKey, training: BatchTraining, deadline_s: float) -> Intake:
        """Waits for samples that are worth a pass, or for the end of the batch, which comes at the deadline."""
        parts, min_tokens = self._parts, self._parts.pacing.min_tokens
        enough = None if min_tokens is None else partial(training.enough, min_tokens=min_tokens)
        started_s = time.time()
        with parts.clock.waiting():
            while (taken := parts.collector.take(key, enough, self._until(deadline_s))) is None:
                if time.monotonic() >= deadline_s and (num_cut := parts.collector.cut(key)):
                    logger.warning("%s goes on without %d samples: its deadline is over", key, num_cut)
                    continue
                waits_for = f"rollouts of {key}: {parts.collector.progress(key)}"
                parts.control.show("waiting", waits_for, parts.collector.waiting_rollouts())
                self._look_around()
                if parts.control.gives_up_iteration():
                    raise StopAskedError
        parts.spans.write("wait", started_s, time.time(), detail="rollouts", batch=key.batch)
        return taken

    def _until(self, deadline_s: float) -> float:
        """How long to wait before the loop looks around, or before a deadline."""
        left_s = deadline_s - time.monotonic()
        return min(left_s, _LOOK_AROUND_S) if left_s > 0 else _LOOK_AROUND_S

    def _look_around(self) -> None:
        """What must be noticed while the loop waits."""
        parts = self._parts
        parts.learner.idle()
        parts.publisher.check()
        parts.collector.check()
        self._take_evaluations()
        if (mark := parts.watch.progress_mark()) != self._fleet_mark:
            self._fleet_mark = mark
            self._progressed()
        idle_s = min(time.monotonic() - self._progressed_s, parts.collector.seconds_since_progress())
        if 0 < self._settings.no_progress_s < idle_s:
            raise NoProgressError(
                f"nothing has moved for {idle_s:.0f} s (run.no_progress_s): the trainer waits for "
                f"{parts.control.status().waits_for}; the scheduler says: {parts.watch.waits() or 'nothing'}"
            )

    def _take_evaluations(self, timeout_s: float = 0.0) -> None:
        for result, batch, figures in self._parts.evaluations.take_finished(timeout_s):
            self._parts.reporter.close_batch(batch.key)
            self._lineage.add_evaluation(result)
            self._parts.run_log.figures(result.weight_version, figures)
            self._parts.run_log.rows(result.weight_version, self._parts.answer_table.rows(result.weight_version, batch))
            self._parts.control.show_figures(figures)

    def _pause_if_asked(self) -> None:
        parts = self._parts
        if not parts.control.paused():
            return
        logger.info("paused after iteration %d", self._lineage.iteration)
        self._count_time(False)
        parts.control.show("paused")
        while parts.control.wait_while_paused(_LOOK_AROUND_S):
            self._progressed()
            self._look_around()
        self._count_time(True)

    def _stop_if_asked(self) -> None:
        if self._parts.control.stop_asked():
            raise StopAskedError

    def _progressed(self) -> None:
        self._progressed_s = time.monotonic()

    def _count_time(self, counting: bool) -> None:
        """Whether the time from now on counts for throughput and idle shares."""
        self._parts.clock.count(counting)
        self._parts.watch.count(counting)

    def _publication_figures(self) -> dict[str, float]:
        """Of the newest version that was announced since the last call, if any."""
        figures = {}
        for publication in self._parts.publisher.take_publications():
            figures["weights/publish_s"] = publication.publish_s
            self._parts.spans.write(
                "publish",
                publication.started_s,
                publication.started_s + publication.publish_s,
                weight_version=publication.weight_version,
            )
        return figures

    def _count_figures(self) -> dict[str, float]:
        counts = self._parts.collector.counts()
        reused, forgotten = self._parts.collector.reused_and_forgotten()
        return {
            "rollouts/duplicate": float(counts.duplicate),
            "rollouts/dropped": float(sum(counts.dropped.values())),
            "rollouts/redispatched": float(self._parts.reporter.redispatched),
            "rollouts/dead_letters": float(self._parts.dead_letters()),
            "rollouts/refused_attempts": float(self._parts.collector.refused_attempts()),
            "rollouts/reused": float(reused),
            "rollouts/forgotten": float(forgotten),
        }
