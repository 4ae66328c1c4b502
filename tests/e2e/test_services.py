"""Runs of all services on the fake engine: what happens around generation and training."""

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

AddsUp = Callable[[dict[str, Any]], None]
FAKE = {
    "generator.engine": "fake",
    "data.prompts_per_batch": 8,
    "data.samples_per_prompt": 4,
    "eval.num_prompts": 32,
    "eval.every": 0,
    "mlflow.tracking_uri": "off",
    # A scheduler dispatches nothing before instances of a life before it must have stopped.
    "scheduler.lease_s": 2,
}
BATCH = 8 * 4


# The mode async is for every day with real engines (test_run.py).
@pytest.mark.parametrize(
    ("mode", "staleness_max"), [("sync", 0), pytest.param("async", 1, marks=pytest.mark.slow), ("colocated", 0)]
)
def test_every_mode_trains_each_sample_once(
    start_run: Callable[..., Any], assert_adds_up: AddsUp, cluster: dict[str, Any], mode: str, staleness_max: int
) -> None:
    run = start_run({**FAKE, **cluster, "pipeline.mode": mode, "trainer.num_iterations": 4})
    summary = run.finish()
    assert run.process.returncode == 0, run.log()
    assert_adds_up(summary)
    assert summary["rollouts"]["trained"] == summary["rollouts"]["received"] == 4 * BATCH
    assert summary["staleness_max"] == staleness_max
    assert run.left_behind() == []


def test_staleness_stays_within_its_bound_when_services_stall_at_random(
    start_run: Callable[..., Any], assert_adds_up: AddsUp
) -> None:
    run = start_run({**FAKE, "trainer.num_iterations": 8, "generator.fake_step_ms": {"1": 4.0, "64": 8.0}})
    run.wait_for_iteration(1)
    services = [run.service(name) for name in ("trainer", "generator-0", "generator-1")]
    chooser = random.Random(0)
    while run.process.poll() is None:
        process = chooser.choice(services)
        try:
            process.suspend()
            time.sleep(chooser.uniform(0.1, 1.0))
            process.resume()
        except psutil.NoSuchProcess:
            break
    summary = run.finish()
    assert run.process.returncode == 0, run.log()
    assert_adds_up(summary)
    assert summary["rollouts"]["trained"] == 8 * BATCH
    assert summary["staleness_max"] == 1


@pytest.mark.slow
def test_a_killed_generator_is_replaced_and_its_samples_are_generated_by_others(
    start_run: Callable[..., Any], assert_adds_up: AddsUp, cluster: dict[str, Any]
) -> None:
    run = start_run(
        {
            **FAKE,
            **cluster,
            "trainer.num_iterations": 5,
            "generator.fake_step_ms": {"1": 20.0},
            "generator.max_running": 8,
            "scheduler.lease_s": 3,
        }
    )
    run.wait_for_iteration(1)
    killed = run.service("generator-1")
    killed.kill()
    summary = run.finish()
    assert run.process.returncode == 0, run.log()
    assert_adds_up(summary)
    assert summary["rollouts"]["trained"] == 5 * BATCH
    assert summary["rollouts"]["redispatched"] > 0
    assert run.left_behind() == []


# How a run ends is for every day with stand-ins for the services (tests/command/test_run.py).
@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_a_run_that_is_ended(start_run: Callable[..., Any], how: signal.Signals) -> None:
    run = start_run({**FAKE, "trainer.num_iterations": 10_000})
    run.wait_for_iteration(1)
    run.remember_children()
    run.process.send_signal(how)
    run.process.wait(60)
    assert run.left_behind() == []
    if how == signal.SIGKILL:
        return
    summary = run.finish()
    assert summary["status"] == "stopped"
    assert run.process.returncode == 130
    assert summary["iterations"] >= 1
    assert list((Path(run.folder) / "checkpoints").iterdir()), "a run that is stopped in order has a checkpoint"


@pytest.mark.slow
def test_a_run_of_which_no_sample_can_be_scored_fails_with_the_reason(
    start_run: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "picky.py").write_text(
        "def reward(response, answer):\n"
        "    if response in ('', answer):\n"
        "        return 0.0\n"
        "    raise SystemExit('no')\n"
    )
    run = start_run(
        {**FAKE, "trainer.num_iterations": 2, "reward.functions": "picky:reward"}, env={"PYTHONPATH": str(tmp_path)}
    )
    answer = run.finish()
    assert run.process.returncode == 1, run.log()
    assert answer["status"] == "failed"
    assert "not one of the 32 samples of batch 0 could be used" in answer["error"]["message"]
    assert "picky:reward raised SystemExit" in answer["error"]["message"]
    assert run.left_behind() == []


def test_a_waiting_fleet_uses_no_cpu(start_run: Callable[..., Any]) -> None:
    """Everything waits for a generator that is suspended; less than 2 % of a core each."""
    run = start_run({**FAKE, "generator.num_instances": 1, "scheduler.lease_s": 20, "trainer.num_iterations": 10_000})
    run.wait_for_iteration(1)
    names = ("trainer", "scheduler", "weights")
    services = {name: run.service(name) for name in names}
    generator = run.service("generator-0")
    generator.suspend()
    time.sleep(2.0)  # what was under way ends
    before = {name: sum(process.cpu_times()[:2]) for name, process in services.items()}
    window_s = 10.0
    time.sleep(window_s)
    for name, process in services.items():
        share = (sum(process.cpu_times()[:2]) - before[name]) / window_s
        assert share < 0.02, f"{name} uses {share:.1%} of a core while it waits"
    generator.resume()
