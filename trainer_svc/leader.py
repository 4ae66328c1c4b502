"""Rank 0: puts together everything that the training loop speaks to, and tells the world how the run ended."""

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from streamrl.digest import tokenizer_digest
from streamrl.kafka.connection import Connection
from streamrl.kafka.dead_letters import DeadLetters
from streamrl.kafka.producer import RecordProducer
from streamrl.kafka.topic_states import refuse_used_topics
from streamrl.kafka.topics import Topics, create_topics
from streamrl.spans import SpanLog
from streamrl.v1.sample_pb2 import SamplingSettings
from streamrl.v1.weights_pb2 import ModelFile
from trainer_svc.acceptance import Acceptance, SharedVersion
from trainer_svc.algorithms import ALGORITHMS
from trainer_svc.answer_table import AnswerTable
from trainer_svc.assembly import recipe_of
from trainer_svc.batch_training import BatchTraining
from trainer_svc.collector import Collector
from trainer_svc.control import TrainerControl
from trainer_svc.evaluation import Evaluations
from trainer_svc.final_model import save_final_model
from trainer_svc.fleet_figures import BusyMeter
from trainer_svc.fleet_phase import FleetPhases
from trainer_svc.fleet_watch import FleetWatch
from trainer_svc.groups import AcceptanceRules
from trainer_svc.learner import Learner
from trainer_svc.lineage import TrainerState
from trainer_svc.outcome_reporter import OutcomeReporter
from trainer_svc.pacing import pacing_of
from trainer_svc.prompt_cursor import CursorState
from trainer_svc.prompt_selection import Selection, SelectionRules, SelectionState
from trainer_svc.prompt_writer import BatchShape, PromptWriter
from trainer_svc.publisher import Publisher
from trainer_svc.resumption import keep_tracker_run, tracker_run
from trainer_svc.rollout_intake import RolloutIntake
from trainer_svc.run_clock import RunClock
from trainer_svc.run_log import Continued, RunLog, TrackedStatus, Tracker
from trainer_svc.settings import TrainerSettings
from trainer_svc.snapshots import AdapterVersions, Snapshots, WholeVersions
from trainer_svc.summary import RunStatus, RunTotals, summarise, write_summary
from trainer_svc.task import Task
from trainer_svc.train_loop import LoopSettings, Parts, TrainLoop

logger = logging.getLogger(__name__)

_CLOSE_LOG_S = 300.0
_CLOSE_LOG_IN_HASTE_S = 15.0
"""When a run was stopped or has failed, somebody waits for this process to end."""
_CANARY_TOKENS = 512


def lead(
    settings: TrainerSettings,
    instance: str,
    control: TrainerControl,
    learner: Learner,
    task: Task,
    model_files: Sequence[ModelFile],
    state: TrainerState,
    shared_version: SharedVersion,
) -> None:
    """Trains, from the first untrained batch to the summary.

    Args:
        instance: name of this process in the run.
        learner: holds the weights that the state is of; its other ranks follow.
        task: prompts and rewards.
        model_files: config and tokenizer.
        state: what the attempt begins with.
        shared_version: of an earlier attempt with this one.

    Raises:
        StreamRLError: the run failed; its summary and the tracker say so too.
    """
    run_log = RunLog(_tracker_of(settings, state), tell=control.note).start()
    run_log.take_up(state.unlogged)
    tracked: TrackedStatus = "FAILED"
    try:
        with ExitStack() as stack:
            run = _assemble(
                settings, instance, control, learner, task, model_files, state, shared_version, run_log, stack
            )
            status: RunStatus = "failed"
            try:
                completed = run.loop.run()
                _save_model(settings, learner, model_files, run_log)
                learner.end()
                status, tracked = ("completed", "FINISHED") if completed else ("stopped", "KILLED")
            finally:
                run_log.close(tracked, _CLOSE_LOG_S if status == "completed" else _CLOSE_LOG_IN_HASTE_S)
                write_summary(settings.run.folder, summarise(status, run.totals()))
    finally:
        run_log.close(tracked, _CLOSE_LOG_IN_HASTE_S)
        control.show("done")


@dataclass(frozen=True)
class _Run:
    loop: TrainLoop
    totals: Callable[[], RunTotals]


def _assemble(
    settings: TrainerSettings,
    instance: str,
    control: TrainerControl,
    learner: Learner,
    task: Task,
    model_files: Sequence[ModelFile],
    state: TrainerState,
    shared_version: SharedVersion,
    run_log: RunLog,
    stack: ExitStack,
) -> _Run:
    """Connects everything; the stack ends it, the last first.

    Raises:
        BrokerUnavailableError: Kafka does not answer.
    """
    run, trainer = settings.run, settings.trainer
    connection, topics = Connection(settings.kafka, instance), Topics(run.id)
    connection.check()
    create_topics(connection, topics, settings.scheduler.max_instances)
    if run.attempt == 1:
        refuse_used_topics(connection, run.id)
    producer = stack.enter_context(RecordProducer(connection))
    dead_letters = DeadLetters(producer, topics.dead_letters, service="trainer_svc", attempt=run.attempt)
    collector = Collector(
        Acceptance(_rules_of(settings), state.counts, shared_version),
        score=task.score,
        report=lambda outcome: reporter.report(outcome),
        dead_letter=dead_letters.send,
        refill=lambda key: writer.refill(key),
    )
    phases = _phases(settings)
    reporter = _reporter(settings, collector, model_files, state.redispatched, phases)
    stack.callback(reporter.close)
    watch = FleetWatch(
        run_id=run.id,
        scheduler_address=settings.rpc.scheduler_address,
        weights_address=settings.rpc.weights_address,
        deadline_s=settings.rpc.deadline_s,
        meter=BusyMeter(state.generator_busy_s, state.generator_available_s),
    ).start()
    stack.callback(watch.close)
    publisher = _publisher(settings)
    stack.callback(publisher.close)
    intake = RolloutIntake(
        connection,
        topics.rollouts,
        settings.kafka.rollout_partitions,
        collector,
        saved_topic_id=state.rollout_topic_id,
        saved_positions=state.rollout_positions,
    )
    stack.callback(intake.close)
    writer = _prompt_writer(settings, task, producer, topics, collector, state)
    lineage, clock = replace(state.lineage), RunClock(state.wall_s, state.wait_s)

    def count_dead_letters() -> int:
        return state.dead_letters + dead_letters.count + watch.dead_letters

    def totals() -> RunTotals:
        watch.refresh()
        bytes_full, bytes_sent = watch.traffic
        return RunTotals(
            run_id=run.id,
            attempt=run.attempt,
            lineage=lineage,
            wall_s=clock.wall_s,
            counts=collector.counts(),
            redispatched=reporter.redispatched,
            dead_letters=count_dead_letters(),
            idle_trainer=clock.idle_share,
            idle_generator=watch.idle_share,
            bytes_full=bytes_full,
            bytes_sent=bytes_sent,
            mlflow_tracking_uri=settings.mlflow_tracking_uri,
            mlflow_run_id=run_log.tracker_run_id,
        )

    parts = Parts(
        learner=learner,
        begin_batch=partial(BatchTraining, recipe_of(settings), learner),
        pacing=pacing_of(settings, phases.set),
        writer=writer,
        collector=collector,
        intake=intake,
        reporter=reporter,
        evaluations=Evaluations(
            task.prompts.evaluation[: settings.eval.num_prompts],
            every=settings.eval.every,
            num_iterations=trainer.num_iterations,
            writer=writer,
            collector=collector,
            first_version=lineage.iteration,
            left=state.open_evaluations,
        ),
        publisher=publisher,
        snapshots=_snapshots(settings, learner, publisher),
        watch=watch,
        run_log=run_log,
        answer_table=AnswerTable(task.describe, settings.mlflow.sample_answers),
        spans=SpanLog(producer, topics.spans, service="trainer_svc", instance="rank-0", attempt=run.attempt),
        control=control,
        clock=clock,
        dead_letters=count_dead_letters,
    )
    loop_settings = LoopSettings(
        attempt=run.attempt,
        num_iterations=trainer.num_iterations,
        checkpoint_every=trainer.checkpoint_every,
        keep_checkpoints=trainer.keep_checkpoints,
        # Where the command sees every process, it knows better: an engine that takes long to start works, too.
        no_progress_s=0.0 if run.watched else run.no_progress_s,
        checkpoint_folder=run.folder / "checkpoints",
        batch_deadline_s=trainer.batch_deadline_s,
    )
    loop = TrainLoop(
        loop_settings,
        parts,
        lineage,
        data_digest=state.data_digest,
        model_files=model_files,
        canaries=task.canaries(_CANARY_TOKENS),
    )
    return _Run(loop, totals)


def _reporter(
    settings: TrainerSettings,
    collector: Collector,
    model_files: Sequence[ModelFile],
    redispatched: int,
    phases: FleetPhases,
) -> OutcomeReporter:
    return OutcomeReporter(
        settings.rpc.scheduler_address,
        run_id=settings.run.id,
        attempt=settings.run.attempt,
        tokenizer_digest=tokenizer_digest(model_files),
        deadline_s=settings.rpc.deadline_s,
        patience_s=settings.rpc.patience_s,
        known_outcomes=collector.known_outcomes,
        on_abandoned=collector.on_abandoned,
        on_error=collector.fail,
        phase=lambda: phases.wanted,
        redispatched=redispatched,
    )


def _publisher(settings: TrainerSettings) -> Publisher:
    return Publisher(
        settings.rpc.weights_address,
        settings.run.id,
        settings.run.attempt,
        chunk_bytes=settings.weights.chunk_bytes,
        deadline_s=settings.rpc.deadline_s,
        patience_s=settings.rpc.patience_s,
    )


def _snapshots(settings: TrainerSettings, learner: Learner, publisher: Publisher) -> Snapshots:
    trainer = settings.trainer
    if trainer.lora_publish == "adapters":
        return AdapterVersions(learner, publisher, trainer.adapter_alpha / trainer.lora_rank)
    return WholeVersions(learner)


def _phases(settings: TrainerSettings) -> FleetPhases:
    return FleetPhases(
        settings.rpc.scheduler_address,
        run_id=settings.run.id,
        attempt=settings.run.attempt,
        patience_s=settings.rpc.patience_s,
    )


def _prompt_writer(
    settings: TrainerSettings,
    task: Task,
    producer: RecordProducer,
    topics: Topics,
    collector: Collector,
    state: TrainerState,
) -> PromptWriter:
    return PromptWriter(
        producer,
        topics.prompts,
        attempt=settings.run.attempt,
        shape=BatchShape(
            prompts_per_batch=settings.data.prompts_per_batch + settings.data.extra_prompts,
            samples_per_prompt=settings.data.samples_per_prompt,
            num_iterations=settings.trainer.num_iterations,
            max_staleness=settings.pipeline.max_staleness,
        ),
        prompts=task.prompts.train,
        cursor=CursorState.from_json(dict(state.cursor), len(task.prompts.train)),
        sampling=SamplingSettings(
            temperature=settings.generator.temperature,
            max_tokens=settings.generator.max_tokens,
            stop_token_ids=task.stop_token_ids,
        ),
        open_batch=collector.open,
        extend_batch=collector.extend,
        is_complete=collector.is_complete,
        first_batch=state.lineage.iteration,
        selection=Selection(
            _selection_rules_of(settings), SelectionState.from_json(state.selection), task.prompts.train.levels
        ),
    )


def _selection_rules_of(settings: TrainerSettings) -> SelectionRules:
    data = settings.data
    return SelectionRules(
        delay=settings.pipeline.max_staleness + 1,
        right_reward=data.right_reward,
        easy_pass_rate=data.easy_pass_rate,
        hard_pass_rate=data.hard_pass_rate,
        rest_iterations=data.rest_iterations,
        level_accuracy=data.curriculum_accuracy,
        level_iterations=data.curriculum_iterations,
    )


def _rules_of(settings: TrainerSettings) -> AcceptanceRules:
    return AcceptanceRules(
        attempt=settings.run.attempt,
        max_staleness=settings.pipeline.max_staleness,
        min_samples=ALGORITHMS[settings.trainer.algorithm].min_samples_per_prompt,
        truncated=settings.trainer.truncated,
        incomplete_groups=settings.trainer.incomplete_groups,
        max_refills=settings.max_refill_prompts,
        enough_groups=settings.data.prompts_per_batch if settings.data.extra_prompts else 0,
        max_tokens=settings.generator.max_tokens,
        overlong_buffer_tokens=settings.overlong_buffer_tokens,
        overlong_penalty=settings.trainer.overlong_penalty,
    )


def _save_model(settings: TrainerSettings, learner: Learner, model_files: Sequence[ModelFile], run_log: RunLog) -> None:
    folder = settings.run.folder / "model"
    save_final_model(folder, learner.weights(), model_files)
    logger.info("the model is in %s", folder)
    run_log.folder(folder, "model")


def _tracker_of(settings: TrainerSettings, state: TrainerState) -> Callable[[], Tracker] | None:
    if not settings.mlflow_tracking_uri:
        return None

    run_id = tracker_run(settings, state)
    # Made now: when the tracker is there, training may have gone on.
    continued = (
        Continued(run_id, state.lineage.iteration, state.open_evaluations, settings.run.attempt) if run_id else None
    )

    def make() -> Tracker:
        from trainer_svc.mlflow_tracker import MlflowTracker

        return MlflowTracker(
            tracking_uri=settings.mlflow_tracking_uri,
            experiment=settings.mlflow.experiment,
            run_name=settings.run.id,
            continued=continued,
            on_created=lambda run_id: keep_tracker_run(settings, run_id),
            settings=_all_settings(settings),
            artifacts=settings.run.dir / "mlartifacts",
        )

    return make


def _all_settings(settings: TrainerSettings) -> dict[str, Any]:
    """Those of all services where the run folder has them, else the trainer's own."""
    file = settings.run.folder / "settings.json"
    resolved: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else settings.model_dump(mode="json")
    return resolved
