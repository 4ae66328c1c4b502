"""Two runs that take turns."""

import asyncio
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest

from benchmarks.turns import in_turns
from streamrl.lifetime import ProcessIdentity
from streamrl.run_folder import RunFolder, RunRecord, ServiceRecord
from streamrl.v1.trainer_pb2_grpc import add_TrainerServiceServicer_to_server
from trainer_svc.control import TrainerControl
from trainer_svc.control_servicer import ControlServicer

NUM_ITERATIONS = 4
ME = ProcessIdentity.of(os.getpid()) or ProcessIdentity(0, 0)


class LoopOfARun:
    """What a trainer shows and is asked, with its own control and servicer, around iterations that do nothing."""

    def __init__(self, name: str, folder: Path, log: list[tuple[str, int]], *, fails_at: int = -1) -> None:
        self.folder = RunFolder(folder / name)
        self._name = name
        self._log = log
        self._fails_at = fails_at
        self._control = TrainerControl()

    def __call__(self) -> Mapping[str, Any]:
        return asyncio.run(self._serve())

    async def _serve(self) -> Mapping[str, Any]:
        server = grpc.aio.server()
        servicer = ControlServicer(self._control, run_id=self._name, attempt=1, num_iterations=NUM_ITERATIONS)
        add_TrainerServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        services = (ServiceRecord(service="trainer", instance="trainer", process=ME, address=f"127.0.0.1:{port}"),)
        record = RunRecord(
            run_id=self._name,
            config="job.toml",
            process=ME,
            started_at="2026-11-29T12:00:00+00:00",
            services=services,
        )
        self.folder.create(record, "{}")
        try:
            await asyncio.get_running_loop().run_in_executor(None, self._iterate)
        finally:
            await server.stop(0)
        return {"run": self._name}

    def _iterate(self) -> None:
        # An evaluation comes first.
        self._take_long_enough()
        for iteration in range(NUM_ITERATIONS):
            if self._control.paused():
                self._control.show("paused")
                while self._control.wait_while_paused(0.1):
                    pass
            if iteration == self._fails_at:
                raise RuntimeError(f"{self._name} fails")
            self._control.show("training")
            self._log.append((self._name, iteration))
            self._take_long_enough()
            self._control.show_iteration(iteration + 1, {})

    def _take_long_enough(self) -> None:
        """For the pause that comes at its end to be asked for."""
        while not self._control.paused():
            threading.Event().wait(0.001)


def test_iterations_alternate_and_who_begins_changes(tmp_path: Path) -> None:
    log: list[tuple[str, int]] = []
    runs = [LoopOfARun(name, tmp_path, log) for name in "ab"]
    assert in_turns([(run.folder, run) for run in runs]) == [{"run": "a"}, {"run": "b"}]
    assert log == [
        (name, iteration) for iteration in range(NUM_ITERATIONS) for name in ("ab" if iteration % 2 == 0 else "ba")
    ]


def test_when_one_fails_the_other_goes_on_to_its_end(tmp_path: Path) -> None:
    log: list[tuple[str, int]] = []
    runs = [LoopOfARun("a", tmp_path, log, fails_at=1), LoopOfARun("b", tmp_path, log)]
    with pytest.raises(RuntimeError, match="a fails"):
        in_turns([(run.folder, run) for run in runs])
    assert [one for one in log if one[0] == "b"] == [("b", iteration) for iteration in range(NUM_ITERATIONS)]


def test_a_run_that_never_starts_is_told(tmp_path: Path) -> None:
    def fails() -> Mapping[str, Any]:
        raise ValueError("no such config")

    log: list[tuple[str, int]] = []
    other = LoopOfARun("b", tmp_path, log)
    with pytest.raises(ValueError, match="no such config"):
        in_turns([(RunFolder(tmp_path / "a"), fails), (other.folder, other)])
    assert len(log) == NUM_ITERATIONS
