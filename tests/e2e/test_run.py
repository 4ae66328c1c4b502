"""Runs with real engines, DeepSpeed, broker and gRPC: few, since each starts engines."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import psutil
import pytest
from safetensors import safe_open

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.timeout(420)]

AddsUp = Callable[[dict[str, Any]], None]


def engine_of(instance: int) -> psutil.Process | None:
    """The process in which the engine of a generator computes."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(instance).children(recursive=True):
            if child.name() == "VLLM::EngineCore":
                return child
    return None


def test_async_training_learns_within_its_staleness_bound_and_outlives_an_engine(
    start_run: Callable[..., Any], assert_adds_up: AddsUp, cluster: dict[str, Any]
) -> None:
    run = start_run({**cluster, "trainer.num_iterations": 10, "eval.every": 0, "scheduler.lease_s": 4})

    def working_engine() -> psutil.Process | None:
        if run.iteration() >= 2:
            for service in run.status()["services"]:
                if service["service"] == "generator" and service["running"] > 8:
                    return engine_of(service["pid"])
        return None

    run.wait_until(working_engine).kill()
    summary = run.finish()
    assert run.process.returncode == 0, run.log()
    assert_adds_up(summary)
    assert summary["status"] == "completed"
    assert summary["eval"]["num_prompts"] >= 512
    assert summary["eval"]["first"] <= 0.6
    assert summary["eval"]["last"] >= 0.85
    assert summary["rollouts"]["trained"] == 10 * 32 * 8
    assert sum(summary["rollouts"]["dropped"].values()) == 0
    assert summary["rollouts"]["redispatched"] > 0
    assert summary["staleness_max"] == 1
    assert run.left_behind() == []

    tracked = mlflow.MlflowClient(summary["mlflow"]["tracking_uri"]).get_run(summary["mlflow"]["run_id"])
    assert tracked.info.status == "FINISHED"
    assert tracked.data.metrics["mismatch/canary_abs_diff_mean"] < 1e-3
    assert tracked.data.params["trainer.num_iterations"] == "10"
    history = mlflow.MlflowClient(summary["mlflow"]["tracking_uri"]).get_metric_history(
        summary["mlflow"]["run_id"], "reward/mean"
    )
    assert [metric.step for metric in history] == list(range(1, 11))

    final = Path(run.folder) / "model"
    with safe_open(final / "model.safetensors", "pt") as weights:  # type: ignore[no-untyped-call]
        assert "lm_head.weight" in set(weights.keys())
    assert (final / "config.json").is_file() and (final / "tokenizer.json").is_file()


@pytest.mark.slow
def test_a_killed_engine_in_sync_loses_nothing_and_trainer_and_generator_agree(
    start_run: Callable[..., Any], assert_adds_up: AddsUp, cluster: dict[str, Any]
) -> None:
    run = start_run(
        {
            **cluster,
            "pipeline.mode": "sync",
            "trainer.num_iterations": 2,
            "eval.every": 0,
            "eval.num_prompts": 64,
            "scheduler.lease_s": 4,
            # Few at once: a batch takes seconds, and samples wait when the worker is killed.
            "generator.max_running": 8,
        }
    )

    def working_engine() -> psutil.Process | None:
        status = run.status()
        if not status or not status["iteration"]:
            return None
        for service in status["services"]:
            if service["service"] == "generator" and service["running"] and service["waiting"] > 20:
                return engine_of(service["pid"])
        return None

    run.wait_until(working_engine).kill()
    summary = run.finish()
    assert run.process.returncode == 0, run.log()
    assert_adds_up(summary)
    assert summary["rollouts"]["trained"] == 2 * 32 * 8
    assert summary["rollouts"]["redispatched"] > 0
    assert summary["staleness_max"] == 0
    assert run.left_behind() == []

    tracked = mlflow.MlflowClient(summary["mlflow"]["tracking_uri"])
    for metric in tracked.get_metric_history(summary["mlflow"]["run_id"], "mismatch/logprob_abs_diff_mean"):
        assert metric.value < 1e-3
