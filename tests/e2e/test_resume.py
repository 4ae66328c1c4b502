"""Runs that are killed whole, at any moment, and taken up again."""

import random
import re
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import pytest

from streamrl.command.apache_kafka import KafkaDownload
from streamrl.identity import SampleKey
from streamrl.kafka.connection import Connection
from streamrl.kafka.positions import topic_extent
from streamrl.kafka.reader import RecordReader, all_partitions
from streamrl.kafka.topics import Topics
from streamrl.settings import KafkaSection
from streamrl.v1.records_pb2 import ROLLOUT_STATUS_OK, Rollout
from trainer_svc.ancestry import read_origins, shared_version

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

AddsUp = Callable[[dict[str, Any]], None]
NUM_ITERATIONS, BATCH = 6, 8 * 4
SETTINGS = {
    "generator.engine": "fake",
    # A batch takes seconds, so that there is something to interrupt.
    "generator.fake_step_ms": {"1": 15.0},
    "generator.max_running": 8,
    "data.prompts_per_batch": 8,
    "data.samples_per_prompt": 4,
    "eval.num_prompts": 16,
    "eval.every": 3,
    "trainer.num_iterations": NUM_ITERATIONS,
    "trainer.checkpoint_every": 2,
    "scheduler.lease_s": 2,
    "mlflow.sample_answers": 1,
}


# Of ten moments at which a run is killed, one is for every day.
@pytest.mark.parametrize(
    "seed", [3, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 1, 2, 4, 5, 6, 7, 8, 9))]
)
def test_a_run_that_is_killed_whole_goes_on_as_if_nothing_had_been(
    start_run: Callable[..., Any], assert_adds_up: AddsUp, broker: KafkaSection | None, seed: int
) -> None:
    chance = random.Random(seed)
    run = start_run(_settings(broker, f"killed-{seed}"))
    _wait_for_iteration(run, chance.randrange(NUM_ITERATIONS))
    time.sleep(chance.uniform(0.0, 3.0))
    _kill(run)
    run.resume()
    summary = run.finish(400)
    assert run.process.returncode == 0, run.log()
    assert_adds_up(summary)
    _check_lineage(run, summary, attempts=2)
    assert run.left_behind() == []
    if broker is not None:
        _check_nothing_was_generated_twice(run, broker)


@pytest.mark.kafka
@pytest.mark.slow
def test_the_topics_of_the_embedded_apache_broker_outlive_a_killed_run(
    start_run: Callable[..., Any], assert_adds_up: AddsUp
) -> None:
    try:
        KafkaDownload.find("")
    except ValueError as error:
        pytest.skip(str(error))
    run = start_run({**_settings(None, "embedded-apache"), "kafka.embedded": "apache"})
    _wait_for_iteration(run, 3)
    _kill(run)
    run.resume()
    summary = run.finish(400)
    assert run.process.returncode == 0, run.log()
    assert_adds_up(summary)
    _check_lineage(run, summary, attempts=2)
    log = (Path(run.folder) / "logs" / "trainer.log").read_text()
    assert int(re.findall(r"rollouts: (\d+) rollouts are reused", log)[-1]) > 0
    assert run.left_behind() == []


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends(
    start_run: Callable[..., Any], assert_adds_up: AddsUp, broker: KafkaSection | None
) -> None:
    run = start_run(_settings(broker, "again-and-again"))
    seen = 0
    for iteration in (1, 3, 5):
        _wait_for_iteration(run, iteration, seen)
        _kill(run)
        # A trainer whose command is gone may still end its iteration, with a checkpoint: one further than was seen.
        assert run.left_behind() == []
        seen = len(_trainer_log(run))
        run.resume()
    summary = run.finish(400)
    assert run.process.returncode == 0, run.log()
    assert_adds_up(summary)
    _check_lineage(run, summary, attempts=4)
    if broker is not None:
        _check_nothing_was_generated_twice(run, broker)


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_weights_bit_for_bit(start_run: Callable[..., Any], tmp_path: Path) -> None:
    """The fake engine's answers depend on their identity alone, so the whole of the learning does."""
    (tmp_path / "parity.py").write_text("def even(response):\n    return float(len(response) % 2)\n")
    settings = {
        **_settings(None, "weights"),
        "pipeline.mode": "sync",
        "trainer.deterministic": True,
        "reward.functions": "parity:even",
        "mlflow.tracking_uri": "off",
    }
    finals = []
    for is_killed in (False, True):
        run = start_run(settings, env={"PYTHONPATH": str(tmp_path)})
        if is_killed:
            _wait_for_iteration(run, 3)
            _kill(run)
            run.resume()
        assert run.finish(400)["reward"]["last"] > 0
        finals.append((Path(run.folder) / "model" / "model.safetensors").read_bytes())
    assert finals[0] == finals[1]


@pytest.mark.slow
def test_a_stopped_run_goes_on_and_a_completed_one_for_longer(
    start_run: Callable[..., Any], assert_adds_up: AddsUp
) -> None:
    ranks = {"trainer.num_ranks": 2, "trainer.zero_stage": 2}
    run = start_run({**_settings(None, "stopped"), **ranks, "pipeline.mode": "sync", "trainer.checkpoint_every": 0})
    _wait_for_iteration(run, 2)
    run.process.send_signal(signal.SIGTERM)
    stopped = run.finish()
    assert stopped["status"] == "stopped"
    run.resume()
    summary = run.finish()
    _check_lineage(run, summary, attempts=2)
    assert summary["staleness_max"] == 0
    assert summary["wall_s"] > stopped["wall_s"]
    run.resume({"trainer.num_iterations": NUM_ITERATIONS + 1})
    longer = run.finish()
    assert run.process.returncode == 0, run.log()
    assert_adds_up(longer)
    assert (longer["iterations"], longer["attempts"]) == (NUM_ITERATIONS + 1, 3)
    assert longer["rollouts"]["trained"] == (NUM_ITERATIONS + 1) * BATCH
    assert longer["mlflow"]["run_id"] == stopped["mlflow"]["run_id"]


def _settings(broker: KafkaSection | None, run_id: str) -> dict[str, Any]:
    servers = {"kafka.bootstrap_servers": broker.bootstrap_servers} if broker is not None else {}
    # A cluster outlives the tests: another run's topics are not to be met.
    return {**SETTINGS, **servers, "run.id": f"{run_id}-{uuid.uuid4().hex[:8]}"}


def _wait_for_iteration(run: Any, iteration: int, seen: int = 0) -> None:
    """By the trainer's own log, after what was seen of it: asking would take longer than an iteration. 0: the trainer
    has begun."""
    ended = re.compile(rf"iteration {iteration} of " if iteration else "trainer INFO")
    run.wait_until(lambda: ended.search(_trainer_log(run), seen), 300)


def _trainer_log(run: Any) -> str:
    log = Path(run.folder) / "logs" / "trainer.log"
    return log.read_text(errors="replace") if log.exists() else ""


def _kill(run: Any) -> None:
    run.remember_children()
    run.process.send_signal(signal.SIGKILL)
    run.process.wait()


def _check_lineage(run: Any, summary: dict[str, Any], attempts: int) -> None:
    """What summary and tracker say is what they would of a run that nothing had happened to."""
    assert (summary["status"], summary["iterations"]) == ("completed", NUM_ITERATIONS)
    assert summary["attempts"] == attempts
    assert summary["staleness_max"] <= 1
    assert summary["rollouts"]["trained"] == summary["rollouts"]["received"] == NUM_ITERATIONS * BATCH
    assert summary["eval"]["num_prompts"] == 16

    tracked = summary["mlflow"]
    client = mlflow.MlflowClient(tracked["tracking_uri"])
    experiment = client.get_experiment_by_name("streamrl")
    assert [one.info.run_id for one in client.search_runs([experiment.experiment_id])] == [tracked["run_id"]]
    assert client.get_run(tracked["run_id"]).info.status == "FINISHED"
    trained = client.get_metric_history(tracked["run_id"], "rollouts/trained")
    assert [(one.step, one.value) for one in sorted(trained, key=lambda one: one.step)] == [
        (step, BATCH) for step in range(1, NUM_ITERATIONS + 1)
    ]
    evaluated = client.get_metric_history(tracked["run_id"], "eval/accuracy")
    assert sorted(one.step for one in evaluated) == [0, 3, 6]
    assert all(one.value <= 1 for one in client.get_metric_history(tracked["run_id"], "staleness/max"))


def _check_nothing_was_generated_twice(run: Any, broker: KafkaSection) -> None:
    """A sample is in the topic once, but for answers with a token of a version that was forgotten."""
    origins = read_origins(Path(run.folder) / "lineage.json")
    copies = Counter(
        SampleKey.from_proto(rollout.id)
        for rollout in _rollouts(run, broker)
        if rollout.status == ROLLOUT_STATUS_OK
        and (
            rollout.attempt == max(origins)
            or max(span.weight_version for span in rollout.version_spans)
            <= shared_version(origins, rollout.attempt, max(origins))
        )
    )
    assert {key: count for key, count in copies.items() if count > 1} == {}


def _rollouts(run: Any, broker: KafkaSection) -> list[Rollout]:
    connection, topic = Connection(broker, "test"), Topics(Path(run.folder).name).rollouts
    partitions = broker.rollout_partitions
    total = sum(topic_extent(connection, topic, partitions, timeout_s=30).end.values())
    reader = RecordReader(connection, topic, all_partitions(partitions))
    try:
        rollouts: list[Rollout] = []
        while len(rollouts) < total:
            rollouts += [Rollout.FromString(record.value) for record in reader.read(timeout_s=10)]
        return rollouts
    finally:
        reader.close()
