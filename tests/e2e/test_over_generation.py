"""Batches that end before their longest answers do, on the fake engine: what is cut is counted, and nothing waits."""

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

AddsUp = Callable[[dict[str, Any]], None]
SETTINGS = {
    "generator.engine": "fake",
    "generator.fake_step_ms": {"1": 20.0},
    "generator.max_running": 64,
    "data.prompts_per_batch": 8,
    "data.samples_per_prompt": 4,
    "eval.num_prompts": 16,
    "eval.every": 0,
    "mlflow.tracking_uri": "off",
    "trainer.num_iterations": 6,
}


def test_a_batch_with_extra_prompts_ends_when_enough_groups_are_whole(
    start_run: Callable[..., Any], assert_adds_up: AddsUp
) -> None:
    run = start_run({**SETTINGS, "data.extra_prompts": 4})
    summary = run.finish()
    assert run.process.returncode == 0, run.log()
    assert_adds_up(summary)
    rollouts = summary["rollouts"]
    assert rollouts["expected"] == 6 * 12 * 4
    assert rollouts["trained"] == 6 * 8 * 4
    assert rollouts["dropped"]["deadline"] > 0
    assert rollouts["dropped"]["deadline"] + rollouts["dropped"]["filtered"] == 6 * 4 * 4
    assert summary["staleness_max"] <= 1


def test_a_batch_with_a_deadline_goes_on_without_the_rest(
    start_run: Callable[..., Any], assert_adds_up: AddsUp
) -> None:
    # A second after the iteration before, with steps of 20 ms, only answers of some 50 tokens can be there.
    run = start_run({**SETTINGS, "trainer.batch_deadline_s": 1.0, "pipeline.mode": "sync"})
    summary = run.finish()
    assert run.process.returncode == 0, run.log()
    assert_adds_up(summary)
    assert summary["rollouts"]["dropped"]["deadline"] > 0
    assert summary["rollouts"]["expected"] == 6 * 8 * 4
