"""Answers that a real engine has begun and another one ends: trained like any other."""

from collections.abc import Callable
from typing import Any

import mlflow
import pytest

from streamrl.rpc.channel import open_channel
from streamrl.v1.generator_pb2 import GeneratorServiceDrainRequest
from streamrl.v1.generator_pb2_grpc import GeneratorServiceStub

pytestmark = [pytest.mark.e2e, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]


def test_answers_that_moved_while_they_ran_agree_with_the_trainer(
    start_run: Callable[..., Any], assert_adds_up: Callable[[dict[str, Any]], None]
) -> None:
    """An instance that must leave at once hands over what runs on it."""
    run = start_run(
        {
            "pipeline.mode": "sync",
            "trainer.num_iterations": 4,
            "eval.every": 0,
            "eval.num_prompts": 64,
            "generator.max_running": 16,
            "generator.drain_timeout_s": 0.01,
        }
    )

    def busy_generator() -> str:
        status = run.status()
        if not status or not status["iteration"]:
            return ""
        busy = (one for one in status["services"] if one["service"] == "generator" and one["running"] == 16)
        return next((one["address"] for one in busy if one["waiting"] > 20), "")

    with open_channel(run.wait_until(busy_generator, 300)) as channel:
        GeneratorServiceStub(channel).Drain(GeneratorServiceDrainRequest(), timeout=20)
    summary = run.finish(400)
    assert run.process.returncode == 0, run.log()
    assert_adds_up(summary)
    assert summary["rollouts"]["trained"] == 4 * 32 * 8
    assert summary["rollouts"]["duplicate"] == 0
    assert summary["staleness_max"] == 0
    tracked = mlflow.MlflowClient(summary["mlflow"]["tracking_uri"])

    def history(name: str) -> list[float]:
        return [metric.value for metric in tracked.get_metric_history(summary["mlflow"]["run_id"], name)]

    assert max(history("fleet/moved")) >= 8, run.log()
    assert max(history("fleet/moved_tokens")) > 0
    # Every token is of the version that is trained, the prefixes of those that moved included.
    assert max(history("mismatch/logprob_abs_diff_mean")) < 1e-3
    assert max(history("mismatch/logprob_abs_diff_max")) < 1e-2
    assert len(history("mismatch/own_tokens")) == 4
