"""The settings of overlay one-cluster on loopback: a trainer of two machines, each service by `serve`.

The engine is the fake one; everything else is real. What Kubernetes does, this test does: it tells each trainer process
its place, and starts again what has died.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streamrl import lifetime
from streamrl.command.ports import free_port
from streamrl.rpc import probe
from streamrl.settings import KafkaSection
from tests.deploy.schemas import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

SETTINGS_FILE = ROOT / "deploy" / "kubernetes" / "overlays" / "one-cluster" / "settings.toml"
RUN_ID = "nodes"
LIMIT_S = 600.0


class Cluster:
    """Processes as pods."""

    def __init__(self, folder: Path, broker: KafkaSection) -> None:
        self._folder = folder
        self._pods: dict[str, subprocess.Popen[bytes]] = {}
        ports: set[int] = set()
        for _ in range(5):
            ports.add(free_port(taken=ports))
        scheduler, weights, meeting, *self._trainers = sorted(ports)
        self._meeting = meeting
        self.run_folder = folder / "runs" / RUN_ID
        self._settings = {
            "run.id": RUN_ID,
            "run.dir": str(folder / "runs"),
            "kafka.bootstrap_servers": broker.bootstrap_servers,
            "kafka.client": "{}",
            "kafka.replication_factor": "1",
            "rpc.scheduler_address": f"127.0.0.1:{scheduler}",
            "rpc.weights_address": f"127.0.0.1:{weights}",
            "mlflow.tracking_uri": "off",
            "generator.engine": "fake",
            "generator.fake_step_ms": "{1 = 25.0}",
            "generator.max_running": "8",
            "data.prompts_per_batch": "8",
            "data.samples_per_prompt": "4",
            "eval.num_prompts": "8",
            "eval.every": "0",
            "trainer.num_iterations": "12",
            "trainer.checkpoint_every": "1",
            "scheduler.lease_s": "2",
        }

    def start(self, service: str, instance: str, **environment: str) -> None:
        command = [sys.executable, "-m", "streamrl.command.main", "serve", service, str(SETTINGS_FILE)]
        command += ["--instance", instance]
        for name, value in self._settings.items():
            command += ["--set", f"{name}={value}"]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("STREAMRL_")}
        self._pods[instance] = lifetime.spawn(
            command,
            log=self._folder / f"{instance}.log",
            env={**inherited, **environment},
            with_signal=signal.SIGTERM,
        )

    def start_trainer(self, node: int) -> None:
        self.start(
            "trainer",
            f"trainer-{node}",
            NODE_RANK=str(node),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(self._meeting),
            STREAMRL_RPC__TRAINER_ADDRESS=self.trainer_address(node),
        )

    def trainer_address(self, node: int) -> str:
        return f"127.0.0.1:{self._trainers[node]}"

    def kill(self, instance: str) -> None:
        self._pods[instance].kill()
        self._pods[instance].wait()

    def until(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, f"{what} does not come:\n{self.logs()}"
            time.sleep(0.2)

    def ended(self, instance: str) -> int:
        try:
            return self._pods[instance].wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{instance} does not end:\n{self.logs()}") from None

    def logs(self) -> str:
        return "\n".join(
            f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in sorted(self._folder.glob("*.log"))
        )

    def close(self) -> None:
        for pod in self._pods.values():
            pod.terminate()
        for pod in self._pods.values():
            try:
                pod.wait(15)
            except subprocess.TimeoutExpired:
                pod.kill()
                pod.wait()


@pytest.fixture
def cluster(tmp_path: Path, kafka_settings: KafkaSection) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, kafka_settings)
    yield cluster
    cluster.close()


def test_a_trainer_of_two_machines_trains_and_goes_on_after_one_of_them_died(cluster: Cluster) -> None:
    cluster.start("weights", "weights")
    cluster.start("scheduler", "scheduler")
    for name in ("generator-0", "generator-1"):
        cluster.start("generator", name)
    # The second machine is there first.
    for node in (1, 0):
        cluster.start_trainer(node)
    checkpoints = cluster.run_folder / "checkpoints"
    cluster.until(lambda: checkpoints.is_dir() and any(checkpoints.glob("*/manifest.json")), "a checkpoint")
    assert [probe.main([cluster.trainer_address(node)]) for node in (0, 1)] == [0, 0]

    cluster.kill("trainer-1")
    assert cluster.ended("trainer-0") != 0
    for node in (1, 0):
        cluster.start_trainer(node)

    assert [cluster.ended(f"trainer-{node}") for node in (0, 1)] == [0, 0], cluster.logs()
    summary = json.loads((cluster.run_folder / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["attempts"] == 2
    assert summary["iterations"] == 12
    assert summary["rollouts"]["trained"] + sum(summary["rollouts"]["dropped"].values()) == 12 * 8 * 4
    # Started once more, neither does anything.
    for node in (1, 0):
        cluster.start_trainer(node)
    assert [cluster.ended(f"trainer-{node}") for node in (0, 1)] == [0, 0]
