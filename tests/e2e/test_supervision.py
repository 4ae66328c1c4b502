"""Runs whose processes are killed one by one: they complete by themselves. And runs that cannot go on: they say why."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamrl.command.apache_kafka import KafkaDownload
from streamrl.command.broker import EmbeddedBroker
from streamrl.settings import KafkaSection

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

AddsUp = Callable[[dict[str, Any]], None]
BATCH = 8 * 4
SETTINGS = {
    "generator.engine": "fake",
    # A batch takes seconds, so that there is something to interrupt.
    "generator.fake_step_ms": {"1": 20.0},
    "generator.max_running": 8,
    "data.prompts_per_batch": 8,
    "data.samples_per_prompt": 4,
    "eval.num_prompts": 16,
    "eval.every": 0,
    "mlflow.tracking_uri": "off",
    "scheduler.lease_s": 2,
    "trainer.checkpoint_every": 1,
}


def _kill_in_turn(run: Any, services: tuple[str, ...]) -> None:
    """Kills one service after another, each once the run has got on with the one before in its place."""
    iteration = 0
    for service in services:
        run.wait_for_iteration(iteration + 1)
        iteration = run.iteration()
        killed = run.service(service)
        killed.kill()
        run.wait_until(lambda s=service, k=killed: _another(run, s, k))


def _another(run: Any, service: str, killed: psutil.Process) -> bool:
    """Whether another process is in the place of a killed one."""
    services = run.status().get("services", [])
    return any(service in (one["service"], one["instance"]) and one["pid"] != killed.pid for one in services)


# What is left out for every day, tests of fewer processes show: a killed generator, a killed broker.
@pytest.mark.parametrize(
    ("mode", "killed", "attempts"),
    [
        ("async", ("scheduler", "weights", "trainer"), 2),
        # The trainer, and a broker that keeps nothing, each cost an attempt.
        pytest.param("async", ("generator-1", "scheduler", "weights", "trainer", "broker"), 3, marks=pytest.mark.slow),
        pytest.param(
            "colocated", ("generator-1", "scheduler", "weights", "trainer", "broker"), 3, marks=pytest.mark.slow
        ),
    ],
)
def test_a_run_of_which_each_process_is_killed_in_turn_completes_by_itself(
    start_run: Callable[..., Any], assert_adds_up: AddsUp, mode: str, killed: tuple[str, ...], attempts: int
) -> None:
    num_iterations = 3 * len(killed)
    run = start_run({**SETTINGS, "pipeline.mode": mode, "trainer.num_iterations": num_iterations})
    _kill_in_turn(run, killed)
    summary = run.finish()
    assert run.process.returncode == 0, run.log()
    assert_adds_up(summary)
    assert summary["status"] == "completed"
    assert summary["rollouts"]["trained"] == summary["rollouts"]["expected"] == num_iterations * BATCH
    assert summary["staleness_max"] <= (1 if mode == "async" else 0)
    assert summary["attempts"] == attempts
    assert run.left_behind() == []


@pytest.fixture
def own_kafka(kafka_download: KafkaDownload, tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """An Apache Kafka that a test may kill."""
    settings = KafkaSection(embedded="apache")
    with EmbeddedBroker.start(settings, data=tmp_path / "kafka", log=tmp_path / "broker.log") as broker:
        broker.wait_ready()
        yield broker


@pytest.mark.kafka
@pytest.mark.slow
def test_a_run_outlives_a_kafka_that_is_away_for_twenty_seconds(
    start_run: Callable[..., Any], assert_adds_up: AddsUp, own_kafka: EmbeddedBroker
) -> None:
    run = start_run(
        {
            **SETTINGS,
            "trainer.num_iterations": 10,
            "kafka.bootstrap_servers": own_kafka.address,
            "scheduler.lease_s": 4,
        }
    )
    run.wait_for_iteration(2)
    own_kafka.process.kill()
    own_kafka.process.wait()
    time.sleep(20)
    own_kafka.start_again()
    summary = run.finish()
    assert run.process.returncode == 0, run.log()
    assert_adds_up(summary)
    assert summary["rollouts"]["trained"] == 10 * BATCH
    # Nobody had to be started again.
    assert summary["attempts"] == 1
    assert "starting it again" not in run.told()
    assert run.left_behind() == []


@pytest.mark.kafka
@pytest.mark.slow
def test_an_embedded_kafka_that_is_killed_comes_back_with_its_topics(
    start_run: Callable[..., Any], assert_adds_up: AddsUp, kafka_download: KafkaDownload
) -> None:
    run = start_run({**SETTINGS, "trainer.num_iterations": 10, "kafka.embedded": "apache"})
    _kill_in_turn(run, ("broker", "trainer", "broker"))
    summary = run.finish()
    assert run.process.returncode == 0, run.log()
    assert_adds_up(summary)
    assert summary["rollouts"]["trained"] == 10 * BATCH
    assert summary["attempts"] == 2
    assert run.left_behind() == []


@pytest.mark.slow
def test_a_run_that_stands_still_is_ended_with_who_waits_for_whom(start_run: Callable[..., Any]) -> None:
    run = start_run(
        {**SETTINGS, "generator.num_instances": 1, "trainer.num_iterations": 10_000, "run.no_progress_s": 8}
    )
    run.wait_for_iteration(1)
    run.service("generator-0").suspend()
    answer = run.finish()
    assert run.process.returncode == 1
    assert answer["status"] == "failed"
    assert answer["error"]["kind"] == "NoProgressError"
    message = answer["error"]["message"]
    assert "(run.no_progress_s): trainer waits for rollouts of batch" in message
    assert "generator-0 has been silent for" in message or "no instance is live" in message
    assert "is stopped by a signal" in message
    # The trainer had the time to save what was done.
    assert list((run.folder / "checkpoints").iterdir())
    assert run.left_behind() == []


@pytest.mark.slow
def test_what_is_stopped_does_not_outlive_its_run(start_run: Callable[..., Any]) -> None:
    run = start_run({**SETTINGS, "trainer.num_iterations": 10_000})
    run.wait_for_iteration(1)
    run.remember_children()
    for name in ("trainer", "scheduler", "generator-0"):
        run.service(name).suspend()
    run.process.send_signal(signal.SIGKILL)
    run.process.wait(60)
    assert run.left_behind() == []
    assert json.loads((run.folder / "run.json").read_text())["status"] == "running"
