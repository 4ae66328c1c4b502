"""What is shown of a run."""

from typing import Any

from rich.console import Console

from streamrl.command.display import run_table
from streamrl.command.figures import (
    FIGURES,
    duration,
    fleet_sentence,
    iteration_line,
    queue_depth,
    summary_rows,
    trainer_sentence,
    waits,
)
from streamrl.command.observer import Observation
from streamrl.v1 import scheduler_pb2
from streamrl.v1.sample_pb2 import PURPOSE_EVALUATION, PURPOSE_TRAIN
from streamrl.v1.trainer_pb2 import TrainerServiceGetStatusResponse
from trainer_svc.figures import FIGURES as TRAINER_FIGURES

STATUS = TrainerServiceGetStatusResponse(
    state="waiting",
    waits_for="waits for rollouts of batch 4: 12 of 256",
    iteration=4,
    num_iterations=30,
    weight_version=4,
    waiting_rollouts=12,
    metrics={"reward/mean": 0.7123, "throughput/tokens_per_s": 12345.6, "idle/trainer": 0.25},
)
FLEET = scheduler_pb2.GetFleetResponse(
    instances=[
        scheduler_pb2.Instance(
            instance="generator-0",
            state=scheduler_pb2.INSTANCE_STATE_LIVE,
            heartbeat=scheduler_pb2.HeartbeatRequest(running=7, waiting=1, weight_version=4),
        ),
        scheduler_pb2.Instance(instance="generator-1", state=scheduler_pb2.INSTANCE_STATE_DEAD),
    ],
    batches=[
        scheduler_pb2.BatchState(purpose=PURPOSE_TRAIN, batch=4, outstanding=20, undispatched=3),
        scheduler_pb2.BatchState(purpose=PURPOSE_EVALUATION, batch=4, outstanding=100, undispatched=100),
    ],
    waits=["batch 6 waits for version 5"],
)


def test_the_figures_are_the_trainers() -> None:
    assert {figure.metric for figure in FIGURES} <= {figure.name for figure in TRAINER_FIGURES}


def test_a_line_shows_the_figures_that_there_are() -> None:
    assert iteration_line(STATUS) == "iteration 4/30  reward 0.712  tokens/s 12,346  trainer idle 25%  version 4"


def test_sentences_say_what_is_there() -> None:
    assert trainer_sentence(Observation(None, None)) == "trainer: starting"
    assert trainer_sentence(Observation(STATUS, None, trainer_answers=False)) == "trainer: does not answer"
    assert trainer_sentence(Observation(STATUS, None)) == "trainer: waiting, waits for rollouts of batch 4: 12 of 256"
    over = TrainerServiceGetStatusResponse(state="done")
    assert trainer_sentence(Observation(over, None, trainer_answers=False)) == "trainer: ending"
    assert fleet_sentence(None, 2) == "scheduler: starting"
    assert fleet_sentence(FLEET, 2) == "generators: 1 of 2 ready"


def test_only_training_samples_count_as_queued() -> None:
    assert queue_depth(FLEET) == (20, 3)


def test_the_table_shows_instances_and_queues_whatever_is_known() -> None:
    console = Console(width=120, record=True, file=None, quiet=False)
    with console.capture() as capture:
        console.print(run_table(Observation(STATUS, FLEET), 2, 75.0))
        console.print(run_table(Observation(None, None), 2, 0.0))
        console.print(run_table(Observation(None, scheduler_pb2.GetFleetResponse()), 2, 0.0))
    text = capture.get()
    for part in ("1 min 15 s", "generator-1", "dead", "3 to dispatch, 20 with generators, 12 to train", "0 of 2 ready"):
        assert part in text


def test_a_summary_is_told_in_words() -> None:
    dropped = {"stale": 0, "abandoned": 3}
    summary: dict[str, Any] = {
        "status": "completed",
        "iterations": 30,
        "wall_s": 61.4,
        "samples_per_s": 125.1,
        "tokens_per_s": 4000.4,
        "eval": {"first": 0.46, "last": 0.96, "num_prompts": 512},
        "reward": {"first": 0.6, "last": 0.92},
        "rollouts": {"expected": 100, "trained": 97, "dropped": dropped, "redispatched": 4, "duplicate": 1},
        "attempts": 2,
        "staleness_max": 1,
        "idle": {"trainer": 0.31, "generator": 0.1},
        "weights": {"version": 30, "bytes_full": 2_000_000, "bytes_sent": 1_500_000},
        "mlflow": {"tracking_uri": "", "run_id": ""},
    }
    rows = dict(summary_rows(summary))
    assert rows["iterations"] == "30 in 1 min 1 s, evaluations apart"
    assert rows["attempts"] == "2"
    assert rows["evaluation"] == "0.460 → 0.960 on 512 prompts"
    assert rows["rollouts"] == "97 trained of 100; dropped: 3 abandoned"
    assert "MLflow" not in rows and "go on with" not in rows
    lost = {**summary, "status": "stopped", "run_id": "r", "mlflow": {"tracking_uri": "sqlite:///x.db", "run_id": ""}}
    assert dict(summary_rows(lost))["MLflow"].startswith("nothing was kept at sqlite:///x.db")
    assert dict(summary_rows(lost))["go on with"] == "streamrl resume r"


def test_nobody_waits_when_the_trainer_ends() -> None:
    assert waits(Observation(STATUS, FLEET)) == ["batch 6 waits for version 5"]
    assert waits(Observation(None, FLEET)) == ["batch 6 waits for version 5"]
    assert waits(Observation(STATUS, None)) == []
    for state in ("stopping", "done"):
        assert waits(Observation(TrainerServiceGetStatusResponse(state=state), FLEET)) == []


def test_durations_are_said_as_people_do() -> None:
    assert [duration(seconds) for seconds in (0.4, 59.4, 60, 3599, 7800)] == [
        "0 s",
        "59 s",
        "1 min 0 s",
        "59 min 59 s",
        "2 h 10 min",
    ]
