"""A place to run the command in, with stand-ins for the services (stub_service.py), and a look at what it leaves."""

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

_MARK = "STREAM_TEST_PLACE"


class Place:
    """A working folder in which `python -m trainer_svc` and the others are stand-ins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mark = uuid.uuid4().hex
        self._started: list[subprocess.Popen[str]] = []
        for service in ("trainer", "generator", "scheduler", "weights"):
            package = folder / f"{service}_svc"
            package.mkdir()
            (package / "__init__.py").touch()
            (package / "__main__.py").write_text(
                f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
                f"import stub_service\nstub_service.main({service!r})\n"
            )
        self.config = folder / "job.toml"
        self.config.write_text("[trainer]\nnum_iterations = 5\n[generator]\nnum_instances = 2\n")

    @property
    def run_folder(self) -> Path:
        return self.folder / "runs" / "r"

    def start(self, *arguments: str, stub: dict[str, Any] | None = None, **environment: str) -> "subprocess.Popen[str]":
        """Starts `streamrl ARGUMENTS`, with the stand-ins' behaviour by instance."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("STREAMRL_")}
        marked = {_MARK: self._mark, "STUB": json.dumps(stub or {}), **environment}
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "streamrl.command.main", *arguments],
            cwd=self.folder,
            env=inherited | marked,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def start_run(self, *arguments: str, stub: dict[str, Any] | None = None) -> "subprocess.Popen[str]":
        """Starts `streamrl run job.toml --json` as run "r"."""
        return self.start("run", "job.toml", "--json", "--set", "run.id=r", *arguments, stub=stub)

    def let_go_on(self) -> None:
        """Lets a trainer that holds (`holds_after`) go on to its end."""
        (self.run_folder / "go_on").touch()

    def call(self, *arguments: str, stub: dict[str, Any] | None = None, **environment: str) -> "Ended":
        """Runs `streamrl ARGUMENTS` to its end."""
        return self.ended(self.start(*arguments, stub=stub, **environment))

    @staticmethod
    def ended(process: "subprocess.Popen[str]") -> "Ended":
        """Waits for the end of a command."""
        stdout, stderr = process.communicate(timeout=90)
        return Ended(process.returncode, stdout, stderr)

    def eventually(self, condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Waits for a condition. A limit, not a measurement: generous."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"it did not come to pass; {self._state()}"
            time.sleep(0.05)

    def _state(self) -> str:
        """What the commands said, the run's record and its services' last lines, for whoever reads of a failed test."""
        said = []
        for process in self._started:
            process.kill()
            said += process.communicate()
        files = [self.run_folder / "run.json", *sorted(self.run_folder.glob("**/*.log"))]
        return "\n".join([*said, *(f"{file.name}: {file.read_text()[-2000:]}" for file in files if file.exists())])

    def processes(self) -> list[psutil.Process]:
        """Everything that was started from here and lives, the command itself included."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(_MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found

    def pid_of(self, instance: str) -> int:
        """The process that is this instance now, by the run's record."""
        services = json.loads((self.run_folder / "run.json").read_text())["services"]
        return next(int(service["process"]["pid"]) for service in services if service["instance"] == instance)


class Ended:
    """A command that has ended."""

    def __init__(self, exit_code: int, stdout: str, stderr: str) -> None:
        self.exit_code = exit_code
        self.stdout = stdout
        self.stderr = stderr

    @property
    def result(self) -> dict[str, Any]:
        """The one line on standard output."""
        (line,) = self.stdout.splitlines()
        result = json.loads(line)
        assert isinstance(result, dict)
        return result


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A place of its own; whatever a failed test leaves running is ended."""
    place = Place(tmp_path)
    yield place
    for process in place.processes():
        process.send_signal(signal.SIGKILL)
