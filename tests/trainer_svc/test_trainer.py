"""Whole runs of the trainer as a process, against a scripted fleet."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamrl.identity import PURPOSE_EVALUATION, PURPOSE_TRAIN, SampleKey
from streamrl.v1.scheduler_pb2 import FLEET_PHASE_GENERATE, FLEET_PHASE_TRAIN

pytestmark = pytest.mark.filterwarnings("ignore")
TIMEOUT_S = 150.0
StartFleet = Callable[..., Any]


class Run:
    """A trainer process and its run folder."""

    def __init__(self, folder: Path, running: Any, model: Path, data: Path, **sections: dict[str, Any]) -> None:
        fleet = running.fleet
        run_id = fleet.topics.run_id
        settings: dict[str, Any] = {
            "run": {"id": run_id, "dir": str(folder)},
            "pipeline": {"mode": "sync"},
            "model": {"path": str(model)},
            "rpc": {"scheduler_address": running.scheduler_address, "weights_address": running.weights_address},
            "kafka": fleet.kafka.model_dump(mode="json"),
            "generator": {"max_tokens": 6},
            "data": {"train": str(data), "eval": str(data), "prompts_per_batch": 3, "samples_per_prompt": 3},
            "reward": {"functions": {"test_trainer_reward:even_tokens": 1.0}},
            "trainer": {"num_iterations": 3, "learning_rate": 1e-3, "no_progress_s": 60},
            "eval": {"num_prompts": 4, "every": 2},
            "mlflow": {"tracking_uri": "off"},
        }
        for name, values in sections.items():
            settings[name] = {**settings.get(name, {}), **values}
        self.folder = folder / run_id
        self.folder.mkdir(parents=True)
        (folder / "test_trainer_reward.py").write_text(
            "def even_tokens(response):\n    words = response.split()\n"
            "    return sum(word.isdigit() and int(word) % 2 == 0 for word in words) / max(1, len(words))\n"
        )
        settings_file = self.folder / "settings.json"
        settings_file.write_text(json.dumps(settings))
        self._log = (folder / f"{run_id}.log").open("w+")
        root = Path(__file__).parents[2]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trainer_svc", str(settings_file)],
            stdout=self._log,
            stderr=self._log,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(root)},
            start_new_session=True,
        )

    def wait(self) -> int:
        try:
            return self.process.wait(TIMEOUT_S)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    @property
    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    @property
    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return summary


@pytest.fixture
def start_run(start_fleet: StartFleet, random_model: Path, counting_file: Path, tmp_path: Path) -> Callable[..., Run]:
    def start(run_id: str, fleet: dict[str, Any] | None = None, **sections: dict[str, Any]) -> tuple[Run, Any]:
        running = start_fleet(run_id, **(fleet or {}))
        return Run(tmp_path, running, random_model, counting_file, **sections), running.fleet

    return start  # type: ignore[return-value]


def check_balance(summary: dict[str, Any], expected: int) -> None:
    rollouts = summary["rollouts"]
    assert rollouts["expected"] == expected == rollouts["trained"] + sum(rollouts["dropped"].values())


def test_a_synchronous_run_trains_publishes_evaluates_and_agrees_with_its_generator(start_run: Any) -> None:
    run, fleet = start_run("trainer-sync", trainer={"checkpoint_every": 2})
    assert run.wait() == 0, run.log
    assert fleet.errors == []
    summary = run.summary
    assert (summary["status"], summary["iterations"], summary["staleness_max"]) == ("completed", 3, 0)
    check_balance(summary, expected=27)
    assert summary["rollouts"]["trained"] == 27
    assert summary["eval"]["num_prompts"] == 4
    assert summary["wall_s"] > 0
    assert sorted(fleet.weights) == [0, 1, 2, 3]
    assert {file.name for file in fleet.headers[0].files} >= {"config.json", "tokenizer.json"}
    assert all(header.canaries for header in fleet.headers.values())
    assert fleet.weights[0] != fleet.weights[1] != fleet.weights[2]
    assert fleet.run_ended.wait(10)
    closed = {(batch.purpose, batch.batch) for report in fleet.reports for batch in report.closed}
    assert closed == {(PURPOSE_TRAIN, 0), (PURPOSE_TRAIN, 1), (PURPOSE_TRAIN, 2)} | {
        (PURPOSE_EVALUATION, version) for version in (0, 2, 3)
    }
    assert {path.name for path in (run.folder / "model").iterdir()} >= {"model.safetensors", "config.json"}
    checkpoints = sorted(path.name for path in (run.folder / "checkpoints").iterdir())
    assert checkpoints == ["attempt-0001-iteration-000002", "attempt-0001-iteration-000003"]
    state = json.loads((run.folder / "checkpoints" / checkpoints[-1] / "state.json").read_text())
    assert state["counts"]["trained"] == 27
    assert state["lineage"]["iteration"] == 3


def test_an_asynchronous_run_on_two_ranks_survives_what_a_fleet_does_wrong(start_run: Any) -> None:
    def fault(key: SampleKey, dispatch: int) -> str:
        if key.purpose == PURPOSE_EVALUATION:
            return ""
        faults = {(0, 0, 0): "fail", (0, 1, 1): "copy", (1, 0, 2): "garbage", (1, 2, 2): "stale"}
        if key[1:] == (2, 1, 0):
            return "fail"  # every time
        return faults.get(key[1:], "") if dispatch == 1 else ""

    run, fleet = start_run(
        "trainer-async",
        {"max_staleness": 1, "fault": fault},
        pipeline={"mode": "async", "max_staleness": 1},
        trainer={"num_ranks": 2, "zero_stage": 2, "saturation_tokens": 20, "micro_batch_tokens": 30},
    )
    assert run.wait() == 0, run.log
    assert fleet.errors == []
    summary = run.summary
    assert (summary["status"], summary["staleness_max"]) == ("completed", 1)
    check_balance(summary, expected=27)
    rollouts = summary["rollouts"]
    assert (rollouts["dropped"]["stale"], rollouts["dropped"]["abandoned"]) == (1, 1)
    assert (rollouts["duplicate"], rollouts["dead_letters"], rollouts["redispatched"]) == (1, 1, 2)
    assert rollouts["trained"] == 25


def test_a_colocated_run_moves_the_fleet_between_its_phases(start_run: Any) -> None:
    run, fleet = start_run(
        "trainer-colocated", pipeline={"mode": "colocated"}, trainer={"num_iterations": 2}, eval={"every": 0}
    )
    assert run.wait() == 0, run.log
    assert fleet.phases == [FLEET_PHASE_GENERATE] + 2 * [FLEET_PHASE_TRAIN, FLEET_PHASE_GENERATE]
    check_balance(run.summary, expected=18)


def test_a_stopped_run_ends_in_order_with_a_checkpoint_and_a_summary(start_run: Any) -> None:
    run, fleet = start_run("trainer-stop", trainer={"num_iterations": 10_000}, eval={"every": 0})
    fleet.wait_for_version(2)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 0, run.log
    summary = run.summary
    assert summary["status"] == "stopped"
    assert summary["iterations"] >= 2
    check_balance(summary, expected=9 * summary["iterations"])
    assert len(list((run.folder / "checkpoints").iterdir())) == 1


def test_a_run_in_which_nothing_moves_fails_and_says_who_waits_for_whom(start_run: Any) -> None:
    run, _ = start_run(
        "trainer-stuck", {"fault": lambda key, dispatch: "lose"}, trainer={"no_progress_s": 3}, eval={"every": 0}
    )
    assert run.wait() == 1
    error = json.loads((run.folder / "services" / "trainer_svc.error.json").read_text())
    assert error["kind"] == "NoProgressError"
    assert "evaluation 0: 0 of 4" in error["message"]
    assert "batch 0 waits for an instance" in error["message"]
    assert run.summary["status"] == "failed"
