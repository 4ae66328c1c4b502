"""A run whose generators stand at the far side of a line: examples/two_sites.toml with one broker, every service by
`streamrl serve`.

Trainer, scheduler, weights_svc and the broker are here; a relay and the generators are behind the line, in their own
network namespace, or beside them on loopback where there is no line. Each site has half of the machine's cores, so that
training takes nothing from generation, as on hosts of their own.
"""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.peers.slow_line import NEAR_HOST, SlowLine
from streamrl import lifetime
from streamrl.command.broker import EmbeddedBroker, tansu_launch
from streamrl.command.ports import free_port
from streamrl.kafka.connection import Connection
from streamrl.kafka.reader import RecordReader, all_partitions
from streamrl.kafka.topics import Topics
from streamrl.rpc.channel import open_channel
from streamrl.settings import KafkaSection
from streamrl.v1.records_pb2 import Rollout
from streamrl.v1.weights_pb2 import ListVersionsRequest, ListVersionsResponse
from streamrl.v1.weights_pb2_grpc import WeightsServiceStub

EXAMPLE = Path(__file__).parents[2] / "examples" / "two_sites.toml"
RUN_ID = "two-sites"
_FAKE = {"generator.engine": "fake", "generator.fake_step_ms": "{ 1 = 8.0, 64 = 16.0 }"}
_LOG_TAIL = 2000
_CAME = re.compile(
    r"^(?P<time>\S+Z) .*version=(?P<version>\d+) \(attempt \d+\) has come from .*: "
    r"(?P<bytes>\d+) bytes for (?P<full>\d+) in (?P<took>[\d.]+) s",
    re.MULTILINE,
)
_LOADED = re.compile(r"^(?P<time>\S+Z) .* loaded: fetched in [\d.]+ s, switched in (?P<took>[\d.]+) s", re.MULTILINE)
_WAITED = re.compile(
    r"(?P<num>\d+) running sequences waited (?P<wait>[\d.]+) s at most: a pause of (?P<pause>[\d.]+) s, and "
    r"(?P<recompute>[\d.]+) s until"
)


Interval = tuple[float, float]
"""Its start and its end in Unix time."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """A version's way to the relay."""

    weight_version: int
    started_s: float
    """Unix time."""
    finished_s: float
    payload_bytes: int
    """Tensor data that the relay received, as it came: differences count as what they took."""
    full_bytes: int
    """Of the version."""


@dataclass(frozen=True, slots=True)
class Wait:
    """What a pause was to the sequences under it, in seconds."""

    longest_s: float
    pause_s: float
    recompute_s: float


class SitesRun:
    """One run, from its start to its end. Close it."""

    def __init__(
        self, folder: Path, line: SlowLine | None, settings: Mapping[str, str], *, num_real: int, num_fake: int
    ) -> None:
        """
        Args:
            line: to the generators; None: they are on loopback.
            settings: changes of the example's.
            num_real: instances with a real engine.
            num_fake: instances whose engine only keeps time; they fetch and load as the others do.
        """
        self._folder = folder
        self._line = line
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        host = "127.0.0.1" if line is None else NEAR_HOST
        self._broker = EmbeddedBroker(tansu_launch(host), folder / "broker.log")
        self._broker.wait_ready()
        trainer, scheduler, self.weights_address, far_weights = (
            f"{where}:{free_port(where)}" for where in (host, host, host, "127.0.0.1")
        )
        self._settings = {
            "run.dir": str(folder / "runs"),
            "rpc.trainer_address": trainer,
            "rpc.scheduler_address": scheduler,
            "rpc.weights_address": self.weights_address,
            "sites.generation.scheduler": scheduler,
            "sites.generation.weights": far_weights,
            "generator.num_instances": str(num_real + num_fake),
            # Real engines take their time to start: the others would do the work alone.
            "scheduler.fleet_wait_s": "600",
            **{f"sites.{site}.kafka.bootstrap_servers": self._broker.address for site in ("training", "generation")},
            **settings,
        }
        for service in ("weights", "scheduler", "trainer"):
            self._serve(service, [service, "--site", "training"])
        self._serve("relay", ["weights", "--site", "generation"], far=True)
        for index in range(num_real + num_fake):
            name = f"generator-{index}"
            changes = _FAKE if index >= num_real else {}
            self._serve(name, ["generator", "--site", "generation", "--instance", name], changes, far=True)

    def __enter__(self) -> "SitesRun":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def finish(self, timeout_s: float) -> dict[str, Any]:
        """Waits for the trainer's end and returns the summary.

        Raises:
            RuntimeError: a service ended before, or the trainer failed or took too long.
        """
        deadline = time.monotonic() + timeout_s
        while (code := self._processes["trainer"].poll()) is None:
            ended = [name for name, process in self._processes.items() if process.poll() not in (None, 0)]
            if ended or time.monotonic() > deadline:
                raise RuntimeError(f"{', '.join(ended) or 'nobody'} ended, and the run does not: {self._logs()}")
            time.sleep(0.2)
        if code != 0:
            raise RuntimeError(f"the trainer failed: {self._logs()}")
        summary: dict[str, Any] = json.loads((self._folder / "runs" / RUN_ID / "summary.json").read_text())
        return summary

    def traffic(self) -> ListVersionsResponse:
        """What weights_svc of the training site holds and has sent."""
        with open_channel(self.weights_address) as channel:
            return WeightsServiceStub(channel).ListVersions(ListVersionsRequest(run_id=RUN_ID), timeout=20)

    def crossings(self) -> list[Crossing]:
        """Of every version that the relay has taken, in order."""
        return crossings_of(self._log("relay"))

    def waits(self) -> list[Wait]:
        """Of the sequences that were running at a switch, in the real engines."""
        return [wait for name in self._processes for wait in waits_of(self._log(name))]

    def pauses(self) -> dict[str, list[Interval]]:
        """Of each instance, in order."""
        return {name: pauses_of(self._log(name)) for name in self._processes if name.startswith("generator-")}

    def rollouts(self) -> list[Rollout]:
        """All that were written."""
        section = KafkaSection(bootstrap_servers=self._broker.address)
        reader = RecordReader(
            Connection(section, "benchmark"), Topics(RUN_ID).rollouts, all_partitions(section.rollout_partitions)
        )
        found: list[Rollout] = []
        try:
            while records := reader.read(2.0):
                found += [Rollout.FromString(record.value) for record in records]
        finally:
            reader.close()
        return found

    def close(self) -> None:
        """Ends whatever still runs."""
        for process in reversed(self._processes.values()):
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._broker.stop()

    def _serve(
        self, name: str, arguments: Sequence[str], changes: Mapping[str, str] | None = None, *, far: bool = False
    ) -> None:
        service, *options = arguments
        command = [sys.executable, "-m", "streamrl.command.main", "serve", service, str(EXAMPLE), *options]
        for setting, value in {**self._settings, **(changes or {})}.items():
            command += ["--set", f"{setting}={value}"]
        if far and self._line is not None:
            command = [*self._line.in_far_namespace, *command]
        command = [*_on_cores(far=far), *command]
        self._processes[name] = lifetime.spawn(command, log=self._folder / f"{name}.log", with_signal=signal.SIGTERM)

    def _log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def _logs(self) -> str:
        return "\n".join(f"--- {name}\n{self._log(name)[-_LOG_TAIL:]}" for name in self._processes)


def _on_cores(*, far: bool) -> list[str]:
    """What a command begins with to have its site's half of the cores."""
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    if half == 0:
        return []
    return ["taskset", "--cpu-list", ",".join(map(str, cores[half:] if far else cores[:half]))]


def crossings_of(relay_log: str) -> list[Crossing]:
    """What a relay says of the versions that it has taken."""
    return [
        Crossing(
            int(came["version"]),
            _unix_time(came["time"]) - float(came["took"]),
            _unix_time(came["time"]),
            int(came["bytes"]),
            int(came["full"]),
        )
        for came in _CAME.finditer(relay_log)
    ]


def pauses_of(generator_log: str) -> list[Interval]:
    """When an instance drew nothing because it loaded a version."""
    return [
        (_unix_time(loaded["time"]) - float(loaded["took"]), _unix_time(loaded["time"]))
        for loaded in _LOADED.finditer(generator_log)
    ]


def waits_of(generator_log: str) -> list[Wait]:
    """What an instance says of the pauses under running sequences."""
    return [
        Wait(float(waited["wait"]), float(waited["pause"]), float(waited["recompute"]))
        for waited in _WAITED.finditer(generator_log)
    ]


def tokens_per_s(
    rollouts: Sequence[Rollout], pauses: Mapping[str, Sequence[Interval]], intervals: Sequence[Interval]
) -> float:
    """Tokens a second inside of disjoint intervals, each rollout's tokens spread evenly over the time in which its
    instance did not pause.

    Args:
        pauses: by instance, disjoint and in order.
    """
    seconds = sum(end_s - start_s for start_s, end_s in intervals)
    tokens = 0.0
    for rollout in rollouts:
        at_work = _at_work(rollout, pauses[rollout.instance])
        tokens += len(rollout.token_ids) * _overlap_s(at_work, intervals) / max(_overlap_s(at_work, at_work), 1e-6)
    return tokens / seconds


def between(intervals: Sequence[Interval]) -> Iterator[Interval]:
    """The gaps of disjoint intervals, which come in order."""
    for (_, end_s), (start_s, _) in pairwise(intervals):
        if start_s > end_s:
            yield end_s, start_s


def _at_work(rollout: Rollout, pauses: Sequence[Interval]) -> list[Interval]:
    """From its first token to its last, without its instance's pauses."""
    first_s, last_s = rollout.timings.started_s, rollout.timings.finished_s
    ends = [(-math.inf, first_s), *pauses, (last_s, math.inf)]
    gaps = ((max(before[1], first_s), min(after[0], last_s)) for before, after in pairwise(ends))
    return [(start_s, end_s) for start_s, end_s in gaps if start_s < end_s]


def _overlap_s(some: Sequence[Interval], others: Sequence[Interval]) -> float:
    return sum(
        max(0.0, min(some_s[1], others_s[1]) - max(some_s[0], others_s[0])) for some_s in some for others_s in others
    )


def _unix_time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
