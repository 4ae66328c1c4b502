"""Whole runs of the trainer against a scripted fleet."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from streamrl.errors import NoProgressError
from streamrl.identity import PURPOSE_EVALUATION, PURPOSE_TRAIN, SampleKey
from streamrl.settings import load
from streamrl.v1.scheduler_pb2 import FLEET_PHASE_GENERATE, FLEET_PHASE_TRAIN
from trainer_svc.control import TrainerControl
from trainer_svc.figures import FIGURES
from trainer_svc.rank import train
from trainer_svc.ranks import Ranks
from trainer_svc.settings import TrainerSettings

pytestmark = pytest.mark.filterwarnings("ignore")
TIMEOUT_S = 150.0
StartFleet = Callable[..., Any]


REWARD = """
import os
from pathlib import Path

def ends_its_process_once(response):
    with Path(__file__).with_name("calls").open("a") as calls:
        calls.write("x")
        calls.flush()
        if calls.tell() == 10:
            os._exit(1)
    return even_tokens(response)

def even_tokens(response):
    words = response.split()
    return sum(word.isdigit() and int(word) % 2 == 0 for word in words) / max(1, len(words))


def sometimes_even(prompt, response):
    # Says nothing about the answers to every other prompt.
    return even_tokens(response) if int(prompt.split()[-1]) % 2 else 0.5
"""


class Run:
    """A run folder, and a fleet that answers."""

    def __init__(
        self, folder: Path, running: Any, model: Path, data: Path, sections: dict[str, dict[str, Any]]
    ) -> None:
        self.fleet = running.fleet
        run_id = self.fleet.topics.run_id
        settings: dict[str, Any] = {
            "run": {"id": run_id, "dir": str(folder), "no_progress_s": 60},
            "pipeline": {"mode": "sync"},
            "model": {"path": str(model)},
            "rpc": {"scheduler_address": running.scheduler_address, "weights_address": running.weights_address},
            "kafka": self.fleet.kafka.model_dump(mode="json"),
            "generator": {"max_tokens": 6},
            "data": {"train": str(data), "eval": str(data), "prompts_per_batch": 3, "samples_per_prompt": 3},
            "reward": {"functions": {"even_reward:even_tokens": 1.0}},
            "trainer": {"num_iterations": 3, "learning_rate": 1e-3},
            "eval": {"num_prompts": 4, "every": 2},
            "mlflow": {"tracking_uri": "off"},
        }
        for name, values in sections.items():
            settings[name] = {**settings.get(name, {}), **values}
        self.folder = folder / run_id
        self.folder.mkdir(parents=True)
        (folder / "even_reward.py").write_text(REWARD)
        self.settings_file = self.folder / "settings.json"
        self.settings_file.write_text(json.dumps(settings))

    def train_here(self, ranks: Ranks) -> Mapping[str, float]:
        """In this process, which has the large libraries in memory. Returns the last figures."""
        control = TrainerControl()
        train(load(TrainerSettings, self.settings_file), control, "trainer_svc", ranks)
        return control.status().metrics

    def start_process(self) -> "subprocess.Popen[bytes]":
        with self._log_file.open("w") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "trainer_svc", str(self.settings_file)],
                stdout=log,
                stderr=log,
                cwd=self.folder.parent,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
                start_new_session=True,
            )

    def wait(self, process: "subprocess.Popen[bytes]") -> int:
        try:
            return process.wait(TIMEOUT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    @property
    def _log_file(self) -> Path:
        return self.folder / "trainer.log"

    @property
    def log(self) -> str:
        return self._log_file.read_text()

    @property
    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return summary


MakeRun = Callable[..., Run]


@pytest.fixture
def make_run(
    start_fleet: StartFleet, random_model: Path, counting_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> MakeRun:
    monkeypatch.syspath_prepend(tmp_path)

    def make(run_id: str, fleet: dict[str, Any] | None = None, **sections: dict[str, Any]) -> Run:
        return Run(tmp_path, start_fleet(run_id, **(fleet or {})), random_model, counting_file, sections)

    return make


def check_balance(summary: dict[str, Any], expected: int) -> None:
    rollouts = summary["rollouts"]
    assert rollouts["expected"] == expected == rollouts["trained"] + sum(rollouts["dropped"].values())


def test_a_synchronous_run_agrees_with_its_generator_and_leaves_everything_behind(
    make_run: MakeRun, ranks: Ranks
) -> None:
    run = make_run("trainer-sync", trainer={"checkpoint_every": 2})
    figures = run.train_here(ranks)
    fleet = run.fleet
    assert fleet.errors == []
    assert figures["mismatch/own_tokens"] > 0
    assert figures["mismatch/logprob_abs_diff_max"] < 1e-4
    assert set(figures) <= {figure.name for figure in FIGURES}
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
    pace = fleet.reports[-1].trainer_pace
    assert 0 < pace.token_s < figures["time/train_s"]
    assert pace.pass_tokens > 0
    # Nothing of a batch is generated in the time of a blocking evaluation, which does not count.
    assert fleet.batch_ends.index((PURPOSE_EVALUATION, 2)) < fleet.batch_ends.index((PURPOSE_TRAIN, 2))
    assert {path.name for path in (run.folder / "model").iterdir()} >= {"model.safetensors", "config.json"}
    checkpoints = sorted(path.name for path in (run.folder / "checkpoints").iterdir())
    assert checkpoints == ["attempt-0001-iteration-000002", "attempt-0001-iteration-000003"]
    state = json.loads((run.folder / "checkpoints" / checkpoints[-1] / "state.json").read_text())
    assert state["counts"]["trained"] == 27
    assert state["lineage"]["iteration"] == 3


def test_an_asynchronous_run_on_two_ranks_survives_what_a_fleet_does_wrong(make_run: MakeRun) -> None:
    def fault(key: SampleKey, dispatch: int) -> str:
        if key.purpose == PURPOSE_EVALUATION:
            return ""
        faults = {(0, 0, 0): "fail", (0, 1, 1): "copy", (1, 0, 2): "garbage", (1, 2, 2): "stale"}
        if key[1:] == (2, 1, 0):
            return "fail"  # every time
        return faults.get(key[1:], "") if dispatch == 1 else ""

    run = make_run(
        "trainer-async",
        {"max_staleness": 1, "fault": fault},
        pipeline={"mode": "async", "max_staleness": 1},
        trainer={
            "num_ranks": 2,
            "zero_stage": 2,
            "saturation_tokens": 20,
            "micro_batch_tokens": 30,
            "packing": "on",
        },
        eval={"every": 1},
    )
    assert run.wait(run.start_process()) == 0, run.log
    assert run.fleet.errors == []
    # The next batch is asked for before the last step, and so before what comes after it.
    batch_ends = run.fleet.batch_ends
    assert batch_ends.index((PURPOSE_TRAIN, 2)) < batch_ends.index((PURPOSE_EVALUATION, 1))
    summary = run.summary
    assert (summary["status"], summary["staleness_max"]) == ("completed", 1)
    check_balance(summary, expected=27)
    rollouts = summary["rollouts"]
    assert (rollouts["dropped"]["stale"], rollouts["dropped"]["abandoned"]) == (1, 1)
    assert (rollouts["duplicate"], rollouts["dead_letters"], rollouts["redispatched"]) == (1, 1, 2)
    assert rollouts["trained"] == 25


def test_prompts_without_spread_are_replaced_while_the_others_are_trained(make_run: MakeRun, ranks: Ranks) -> None:
    run = make_run(
        "trainer-dapo",
        {"max_staleness": 1},
        pipeline={"mode": "async", "max_staleness": 1},
        reward={"functions": {"even_reward:sometimes_even": 1.0}},
        trainer={"algorithm": "dapo", "max_refill_prompts": 100, "saturation_tokens": 20},
        eval={"every": 0},
    )
    figures = run.train_here(ranks)
    assert run.fleet.errors == []
    rollouts = run.summary["rollouts"]
    assert rollouts["expected"] == rollouts["received"] == rollouts["trained"] + rollouts["dropped"]["filtered"]
    # Nearly all answers of the random model are as long as they may be: each loses the whole penalty.
    assert figures["reward/overlong_penalty_mean"] > 0.5
    assert rollouts["dropped"]["filtered"] > 0
    # The batches are full.
    assert rollouts["trained"] == 27


def test_ppo_with_a_reference_prepares_samples_as_they_arrive(make_run: MakeRun, ranks: Ranks) -> None:
    run = make_run(
        "trainer-ppo",
        trainer={
            "algorithm": "ppo",
            "kl": "reward",
            "kl_coefficient": 0.01,
            "off_policy": "truncated",
            "steps_per_batch": 2,
            "saturation_tokens": 20,
            "packing": "on",
        },
        eval={"every": 0},
    )
    figures = run.train_here(ranks)
    assert run.fleet.errors == []
    assert set(figures) <= {figure.name for figure in FIGURES}
    assert figures["kl/reference_k3"] > 0
    assert figures["critic/value_mean"] != 0
    # Between generator and the policy at the batch's start, whatever its first step has changed.
    assert figures["mismatch/own_tokens"] == figures["train/tokens"]
    assert figures["mismatch/logprob_abs_diff_max"] < 1e-4
    assert run.summary["rollouts"]["trained"] == 27
    (checkpoint,) = (run.folder / "checkpoints").iterdir()
    assert (checkpoint / "critic" / "deepspeed").is_dir()


def test_a_colocated_run_moves_the_fleet_between_its_phases(make_run: MakeRun, ranks: Ranks) -> None:
    run = make_run(
        "trainer-colocated",
        pipeline={"mode": "colocated"},
        trainer={"num_iterations": 2},
        eval={"every": 0},
        # After the check and the first evaluation, the tenth call is of a training sample.
        reward={"functions": {"even_reward:ends_its_process_once": 1.0}, "num_workers": 1},
        data={"easy_pass_rate": 1.0, "right_reward": -1.0},
    )
    figures = run.train_here(ranks)
    assert run.fleet.phases == [FLEET_PHASE_GENERATE] + 2 * [FLEET_PHASE_TRAIN, FLEET_PHASE_GENERATE]
    check_balance(run.summary, expected=18)
    rollouts = run.summary["rollouts"]
    assert (rollouts["dropped"]["infrastructure"], rollouts["trained"]) == (1, 17)
    # Every prompt is left out from now on, but for the one that an answer is missing of.
    (checkpoint,) = (run.folder / "checkpoints").iterdir()
    assert len(json.loads((checkpoint / "state.json").read_text())["selection"]["rests"]) == 5
    assert figures["data/left_out"] in (2.0, 3.0)
    assert 0 < figures["data/epoch"] < 1


def test_a_stopped_run_ends_in_order_with_a_checkpoint_and_a_summary(make_run: MakeRun) -> None:
    run = make_run("trainer-stop", trainer={"num_iterations": 10_000}, eval={"every": 0})
    process = run.start_process()
    run.fleet.wait_for_version(2)
    process.send_signal(signal.SIGTERM)
    assert run.wait(process) == 0, run.log
    summary = run.summary
    assert summary["status"] == "stopped"
    assert summary["iterations"] >= 2
    check_balance(summary, expected=9 * summary["iterations"])
    assert len(list((run.folder / "checkpoints").iterdir())) == 1


def test_a_run_in_which_nothing_moves_fails_and_says_who_waits_for_whom(make_run: MakeRun, ranks: Ranks) -> None:
    run = make_run(
        "trainer-stuck", {"fault": lambda key, dispatch: "lose"}, run={"no_progress_s": 2}, eval={"every": 0}
    )
    with pytest.raises(NoProgressError, match=r"evaluation 0: 0 of 4.*batch 0 waits for an instance"):
        run.train_here(ranks)
    assert run.summary["status"] == "failed"
    check_balance(run.summary, expected=0)
