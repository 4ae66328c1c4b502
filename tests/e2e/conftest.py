"""Whole runs as a user starts them: `streamrl run` in a process of its own."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamrl.settings import KafkaSection
from tests.run_status import status_of

LAPTOP = Path(__file__).parents[2] / "examples" / "laptop.toml"


class Run:
    """One `streamrl run --json` (and later `resume --json`), its output in files of the test's folder."""

    def __init__(self, folder: Path, config: Path, settings: dict[str, Any], env: dict[str, str] | None = None) -> None:
        settings = {"run.id": "e2e", "run.dir": str(folder / "runs"), **settings}
        self.folder = folder / "runs" / settings["run.id"]
        self._stdout, self._stderr = folder / "stdout", folder / "stderr"
        self._env = env
        self.children: set[psutil.Process] = set()
        self._start(["run", str(config)], settings)

    def resume(self, settings: dict[str, Any] | None = None) -> None:
        """Takes the run up again, once its process has ended: from now on `process` is that command."""
        self._start(["resume", str(self.folder)], settings or {})

    def _start(self, arguments: list[str], settings: dict[str, Any]) -> None:
        command = [sys.executable, "-m", "streamrl.command.main", *arguments, "--json"]
        for name, value in settings.items():
            command += ["--set", f"{name}={_toml(value)}"]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._stdout.open("w"),
            stderr=self._stderr.open("w"),
            env={**os.environ, **(self._env or {})},
        )

    def status(self) -> dict[str, Any]:
        """What `streamrl status --json` says now; empty while there is nothing to say."""
        return status_of(self.folder)

    def wait_until(self, condition: Callable[[], Any], timeout_s: float = 180) -> Any:
        """Waits for something true while the run lives, and returns it."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"the run ended early: {self.log()}"
            self.remember_children()
            if found := condition():
                return found
            time.sleep(0.2)
        raise AssertionError(f"waited {timeout_s} s in vain: {self.log()}")

    def iteration(self) -> int:
        """Trainer iterations done."""
        return int(self.status().get("iteration") or 0)

    def wait_for_iteration(self, iteration: int, timeout_s: float = 180) -> None:
        self.wait_until(lambda: self.iteration() >= iteration, timeout_s)

    def remember_children(self) -> None:
        """Notes every process that descends from the run, so that a test can ask for them after its end."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.children |= set(psutil.Process(self.process.pid).children(recursive=True))

    def service(self, name: str) -> psutil.Process:
        """The process of a service or instance, by its name in `status`."""
        for service in self.status()["services"]:
            if name in (service["service"], service["instance"]):
                return psutil.Process(service["pid"])
        raise AssertionError(f"no service {name}")

    def finish(self, timeout_s: float = 240) -> dict[str, Any]:
        """Waits for the end and returns the one line of standard output."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None and time.monotonic() < deadline:
            self.remember_children()
            time.sleep(0.2)
        assert self.process.poll() is not None, f"the run does not end: {self.log()}"
        lines = self._stdout.read_text().splitlines()
        assert len(lines) == 1, f"{len(lines)} lines on standard output: {lines}; {self.log()}"
        summary: dict[str, Any] = json.loads(lines[0])
        return summary

    def told(self) -> str:
        """What it said on standard error."""
        return self._stderr.read_text()

    def log(self) -> str:
        """The end of what the run and its services said."""
        parts = [self.told()[-3000:]]
        for log in sorted((self.folder / "logs").glob("*.log")):
            parts.append(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}")
        return "\n".join(parts)

    def left_behind(self, timeout_s: float = 10) -> list[str]:
        """Descendants that still live `timeout_s` later."""
        _, alive = psutil.wait_procs(self.children, timeout=timeout_s)
        return [f"{process.pid} {' '.join(process.cmdline()[:4])}" for process in alive if process.status() != "zombie"]

    def close(self) -> None:
        self.remember_children()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        for process in self.children:
            if process.is_running():
                process.kill()


def _toml(value: Any) -> str:
    """A value as `--set` takes it."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    return value if isinstance(value, str) else json.dumps(value)


StartRun = Callable[..., Run]


@pytest.fixture
def start_run(tmp_path: Path) -> Iterator[StartRun]:
    """Starts runs of the laptop example (or `config`) with changed settings; ends what is left of them afterwards."""
    runs: list[Run] = []

    def start(settings: dict[str, Any], config: Path = LAPTOP, env: dict[str, str] | None = None) -> Run:
        folder = tmp_path / str(len(runs))
        folder.mkdir()
        runs.append(Run(folder, config, settings, env))
        return runs[-1]

    yield start
    for run in runs:
        run.close()


@pytest.fixture(params=["embedded", pytest.param("apache", marks=[pytest.mark.kafka, pytest.mark.slow])])
def broker(request: pytest.FixtureRequest) -> KafkaSection | None:
    """The cluster that runs use; None: each starts the embedded broker, which its topics do not outlive."""
    if request.param == "embedded":
        return None
    settings: KafkaSection = request.getfixturevalue("apache_kafka_settings")
    return settings


@pytest.fixture
def cluster(broker: KafkaSection | None) -> dict[str, Any]:
    """Settings of a run on that cluster, under a name that no other run has there."""
    if broker is None:
        return {}
    return {"kafka.bootstrap_servers": broker.bootstrap_servers, "run.id": f"e2e-{uuid.uuid4().hex[:8]}"}


@pytest.fixture
def assert_adds_up() -> Callable[[dict[str, Any]], None]:
    """The equations that hold for every summary."""

    def check(summary: dict[str, Any]) -> None:
        rollouts = summary["rollouts"]
        assert rollouts["expected"] == rollouts["trained"] + sum(rollouts["dropped"].values())
        assert rollouts["received"] >= rollouts["trained"]
        assert summary["samples_per_s"] == pytest.approx(rollouts["trained"] / summary["wall_s"], rel=0.01)
        assert all(0 <= share <= 1 for share in summary["idle"].values())
        assert summary["weights"]["bytes_sent"] <= summary["weights"]["bytes_full"]
        assert summary["weights"]["version"] == summary["iterations"]

    return check
