"""Weights between sites: bytes a version on real training, what differences cost, and how fast versions move.

Versions come from real runs: SmolLM2 in bfloat16 at three learning rates, and the laptop model in float32. The
difference of each to the one before is made, applied and compared on one core, beside a copy of the same bytes in
memory. The versions of one run are then published at one end of a line of 100 Mbit/s and 40 ms to a relay at the other,
with four receivers, and one version over one connection and over several: that needs root, and is left out without. At
last 2 GB of tensors go through a weights_svc of its own process, beside one gRPC stream that does nothing else. Half an
hour.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

import grpc
from safetensors import safe_open

from benchmarks.peers import raw_stream
from benchmarks.peers.slow_line import NEAR_HOST, SlowLine
from benchmarks.result import Cell, Result
from generator_svc.weight_fetcher import WeightFetch, WeightSource
from streamrl.command.ports import free_port
from streamrl.delta_codec import decode_delta, encode_delta
from streamrl.dtypes import ITEM_BYTES
from streamrl.rpc.channel import open_channel
from streamrl.rpc.chunks import cut
from streamrl.settings import WeightsSection
from streamrl.v1.weights_pb2 import ListVersionsRequest, ModelFile, VersionManifest
from streamrl.v1.weights_pb2_grpc import WeightsServiceStub
from trainer_svc.publisher import Publisher, Snapshot

if TYPE_CHECKING:
    from torch import Tensor

NUM_VERSIONS = 10
RUNS = {
    "smollm2/1e-6": ("examples/smollm2.toml", "1e-6"),
    "smollm2/1e-5": ("examples/smollm2.toml", "1e-5"),
    "smollm2/1e-4": ("examples/smollm2.toml", "1e-4"),
    "laptop": ("examples/laptop.toml", "1e-4"),
}
LINE_RUN = "smollm2/1e-6"
LINE_BYTES_PER_S, LINE_ROUND_TRIP_S = 100e6 / 8, 0.04
NUM_RECEIVERS = 4
NARROW_WINDOW_BYTES = 2**18
"""The line holds twice as much."""
SHARE_LIMITS = {"smollm2/1e-6": 0.10}
CODEC_GOAL_BYTES_PER_S = 500e6
STREAM_GOAL = 0.5
SMALL_BYTES, LARGE_BYTES = 2**28, 2**31
MEMORY_LIMIT_BYTES = 64 * 2**20
CHUNK_BYTES = WeightsSection().chunk_bytes
_TENSOR_BYTES = 32 * 2**20
_RUN_ID = "benchmark"


def measure() -> Result:
    """Everything, one after the other."""
    result = Result("weights", {"num_versions": NUM_VERSIONS, "chunk_bytes": CHUNK_BYTES, "large_bytes": LARGE_BYTES})
    for name, (config, learning_rate) in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            _train(config, learning_rate, folder)
            versions = Path(folder) / _RUN_ID / "weights"
            result.cells += version_cells(name, versions)
            if name == LINE_RUN and os.geteuid() == 0:
                result.cells += line_cells(versions)
    if os.geteuid() == 0:
        result.cells += connection_cells()
    result.cells += transfer_cells()
    return result


def version_cells(name: str, folder: Path) -> list[Cell]:
    """Differences of each version in a run's folder to the one before.

    Raises:
        ValueError: one did not come out as it went in.
    """
    files = sorted(folder.glob("version-*.safetensors"))
    steps = [_Step.measure(base, target) for base, target in pairwise(files)]
    share = mean(step.share for step in steps)
    limit = SHARE_LIMITS.get(name)
    cells = [
        Cell(f"{name}/share", share, "of the full size")
        if limit is None
        else Cell.limited(f"{name}/share", share, "of the full size", limit=limit)
    ]
    copied = mean(step.copy_bytes_per_s for step in steps)
    for figure in ("encode", "apply"):
        rate = mean(getattr(step, f"{figure}_bytes_per_s") for step in steps)
        cells.append(
            Cell.compared(f"{name}/{figure}", rate, "bytes/s", against="goal", peer=CODEC_GOAL_BYTES_PER_S, goal=1.0)
        )
        cells.append(Cell(f"{name}/{figure}_of_copy", rate / copied, "of a copy in memory"))
    return cells


class _Step:
    """One version's difference to the one before: rates are of whole tensors' bytes, in processor time of one core."""

    def __init__(self) -> None:
        self.num_bytes = self.num_sent = 0
        self.encode_s = self.apply_s = self.copy_s = 0.0

    @classmethod
    def measure(cls, base: Path, target: Path) -> "_Step":
        step = cls()
        for old, new, item_bytes in _tensor_pairs(base, target):
            room = bytearray(CHUNK_BYTES)
            for _index, offset, length in cut([len(new)], CHUNK_BYTES):
                before, after = old[offset : offset + length], new[offset : offset + length]
                started = time.thread_time()
                encoding, data = encode_delta(before, after, item_bytes)
                encoded = time.thread_time()
                came_out = decode_delta(encoding, data, before, length, item_bytes)
                applied = time.thread_time()
                room[:length] = after
                copied = time.thread_time()
                if came_out != after:
                    raise ValueError(f"a difference of {target} did not come out as it went in")
                step.num_bytes += length
                step.num_sent += len(data)
                step.encode_s += encoded - started
                step.apply_s += applied - encoded
                step.copy_s += copied - applied
        return step

    @property
    def share(self) -> float:
        return self.num_sent / self.num_bytes

    @property
    def encode_bytes_per_s(self) -> float:
        return self.num_bytes / self.encode_s

    @property
    def apply_bytes_per_s(self) -> float:
        return self.num_bytes / self.apply_s

    @property
    def copy_bytes_per_s(self) -> float:
        return self.num_bytes / self.copy_s


def _tensor_pairs(base: Path, target: Path) -> Iterator[tuple[memoryview, memoryview, int]]:
    """Data of each tensor before and after, and its item size."""
    import torch

    with safe_open(base, "pt") as before, safe_open(target, "pt") as after:
        for name in after.keys():  # noqa: SIM118  (no mapping)
            item_bytes = ITEM_BYTES[after.get_slice(name).get_dtype()]
            old, new = (
                file.get_tensor(name).reshape(-1).view(torch.uint8).numpy().data.cast("B") for file in (before, after)
            )
            yield old, new, item_bytes


def line_cells(folder: Path) -> list[Cell]:
    """What crosses a slow line for a relay with several receivers, and how much of the line the first version uses."""
    files = sorted(folder.glob("version-*.safetensors"))[: 1 + NUM_VERSIONS]
    with (
        SlowLine(bytes_per_s=LINE_BYTES_PER_S, round_trip_s=LINE_ROUND_TRIP_S) as line,
        tempfile.TemporaryDirectory() as near,
        tempfile.TemporaryDirectory() as far,
        _weights_service(Path(near), host=NEAR_HOST) as (origin, _process),
        _far_site(line, origin, Path(far), num_receivers=NUM_RECEIVERS, num_versions=len(files)) as receivers,
    ):
        steps = [_across(origin, line, receivers, version, _tensors(file)) for version, file in enumerate(files)]
    first, later = steps[0], steps[1:]
    whole = first.full_bytes
    return [
        Cell("line/first/payload", first.payload_bytes / whole, "copies"),
        Cell("line/first/interface", first.interface_bytes / whole, "copies"),
        Cell.compared(
            "line/first/rate", whole / first.took_s, "bytes/s", against="line", peer=LINE_BYTES_PER_S, goal=STREAM_GOAL
        ),
        Cell("line/later/payload", mean(step.payload_bytes for step in later) / whole, "copies"),
        Cell("line/later/interface", mean(step.interface_bytes for step in later) / whole, "copies"),
        Cell("line/later/took", mean(step.took_s for step in later), "s, from the announcement to the last receiver"),
    ]


def connection_cells() -> list[Cell]:
    """The same line to a machine that lets a connection have less under way than the line holds: over one connection,
    and over several."""
    rates = {num: _rate_over(num) for num in (1, WeightsSection().num_connections)}
    (_, alone), (num_connections, together) = rates.items()
    return [
        Cell("line/narrow/1_connection", alone, "bytes/s"),
        Cell.compared(
            f"line/narrow/{num_connections}_connections",
            together,
            "bytes/s",
            against="line/narrow/1_connection",
            peer=alone,
            goal=1.0,
        ),
    ]


def _rate_over(num_connections: int) -> float:
    import torch

    tensors = [(f"layer.{index}", torch.randint(256, (2**21,), dtype=torch.uint8)) for index in range(20)]
    with (
        SlowLine(bytes_per_s=LINE_BYTES_PER_S, round_trip_s=LINE_ROUND_TRIP_S) as line,
        tempfile.TemporaryDirectory() as near,
        tempfile.TemporaryDirectory() as far,
        _weights_service(Path(near), host=NEAR_HOST) as (origin, _process),
    ):
        window = f"net.ipv4.tcp_rmem=4096 {NARROW_WINDOW_BYTES} {NARROW_WINDOW_BYTES}"
        subprocess.run([*line.in_far_namespace, "sysctl", "--quiet", "--write", window], check=True)
        settings = {"num_connections": num_connections}
        with _far_site(line, origin, Path(far), num_receivers=1, num_versions=1, **settings) as receivers:
            crossing = _across(origin, line, receivers, 0, tensors)
    return crossing.full_bytes / crossing.took_s


@contextmanager
def _far_site(
    line: SlowLine, origin: str, folder: Path, *, num_receivers: int, num_versions: int, **weights: object
) -> "Iterator[subprocess.Popen[str]]":
    """A relay behind the line and those that fetch from it, which say when each version has come.

    Args:
        weights: the relay's settings.
    """
    relay, settings = f"127.0.0.1:{free_port()}", folder / "settings.json"
    settings.write_text(
        json.dumps(
            {
                "run": {"id": _RUN_ID, "dir": str(folder), "site": "far"},
                "rpc": {"weights_address": relay},
                "weights": {"upstream": origin, **weights},
            }
        )
    )
    numbers = (str(num_receivers), str(num_versions))
    service = subprocess.Popen(
        [*line.in_far_namespace, sys.executable, "-m", "weights_svc", str(settings)], stderr=subprocess.DEVNULL
    )
    receivers = subprocess.Popen(
        [*line.in_far_namespace, *(sys.executable, "-m", "benchmarks.peers.far_receivers", relay, _RUN_ID, *numbers)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield receivers
    finally:
        for process in (receivers, service):
            process.terminate()
            process.wait()


@dataclass(frozen=True)
class _Crossing:
    """One version, from its announcement to the last receiver."""

    full_bytes: int
    payload_bytes: int
    interface_bytes: int
    took_s: float


def _tensors(file: Path) -> "list[tuple[str, Tensor]]":
    with safe_open(file, "pt") as tensors:
        return [(name, tensors.get_tensor(name)) for name in tensors.keys()]  # noqa: SIM118  (no mapping)


def _across(
    origin: str, line: SlowLine, receivers: "subprocess.Popen[str]", version: int, named: "list[tuple[str, Tensor]]"
) -> _Crossing:
    files = [ModelFile(name="config.json", content=b"{}")] if version == 0 else []
    publisher = Publisher(origin, _RUN_ID, 1, chunk_bytes=CHUNK_BYTES, deadline_s=20.0, patience_s=60.0)
    payload_before, interface_before = _sent_bytes(origin), line.to_far.num_bytes
    publication = publisher.publish(Snapshot(version, named, files))
    announced_s = publication.started_s + publication.publish_s
    publisher.close()
    assert receivers.stdout is not None
    arrived_s = float(receivers.stdout.readline())
    return _Crossing(
        publication.num_bytes,
        _sent_bytes(origin) - payload_before,
        line.to_far.num_bytes - interface_before,
        arrived_s - announced_s,
    )


def _sent_bytes(address: str) -> int:
    with open_channel(address) as channel:
        listed = WeightsServiceStub(channel).ListVersions(ListVersionsRequest(run_id=_RUN_ID), timeout=20)
    return int(listed.bytes_sent)


def transfer_cells() -> list[Cell]:
    """Publish and fetch beside a raw stream, and what they cost the service in memory."""
    with tempfile.TemporaryDirectory() as folder, _weights_service(Path(folder)) as (address, process):
        with _PeakMemory(process) as small_memory:
            _publish_and_fetch(address, 0, SMALL_BYTES)
        with _PeakMemory(process) as large_memory:
            publish_s, fetch_s = _publish_and_fetch(address, 1, LARGE_BYTES)
    with _raw_server() as address:
        pushed = raw_stream.push(address, LARGE_BYTES, CHUNK_BYTES)
        pulled = raw_stream.pull(address, LARGE_BYTES)
    more_bytes = large_memory.most_bytes - small_memory.most_bytes
    published, fetched = LARGE_BYTES / publish_s, LARGE_BYTES / fetch_s
    return [
        Cell("raw/push", pushed, "bytes/s"),
        Cell("raw/pull", pulled, "bytes/s"),
        Cell.compared("publish", published, "bytes/s", against="raw/push", peer=pushed, goal=STREAM_GOAL),
        Cell.compared("fetch", fetched, "bytes/s", against="raw/pull", peer=pulled, goal=STREAM_GOAL),
        Cell.limited("memory/large_over_small", max(more_bytes, 0), "bytes", limit=MEMORY_LIMIT_BYTES),
    ]


def _publish_and_fetch(address: str, weight_version: int, num_bytes: int) -> tuple[float, float]:
    """Seconds to the announcement, and from the negotiation to the last checked byte."""
    import torch

    tensors = [
        (f"layer.{index}", torch.randint(256, (_TENSOR_BYTES,), dtype=torch.uint8))
        for index in range(num_bytes // _TENSOR_BYTES)
    ]
    publisher = Publisher(address, _RUN_ID, 1, chunk_bytes=CHUNK_BYTES, deadline_s=20.0, patience_s=60.0)
    publication = publisher.publish(Snapshot(weight_version, tensors))
    publisher.close()
    manifest = _manifest(address, weight_version)
    source = WeightSource(address, _RUN_ID, attempt=1, receiver="benchmark", site="")
    fetched = WeightFetch(source, manifest).run()
    fetched.buffer.close()
    return publication.publish_s, fetched.fetch_s


def _manifest(address: str, weight_version: int) -> VersionManifest:
    with open_channel(address) as channel:
        listed = WeightsServiceStub(channel).ListVersions(ListVersionsRequest(run_id=_RUN_ID), timeout=20)
    return next(manifest for manifest in listed.versions if manifest.weight_version == weight_version)


class _PeakMemory:
    """The most anonymous memory of a process inside the block."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._status = Path(f"/proc/{process.pid}/status")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self.most_bytes = 0

    def __enter__(self) -> "_PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(0.05):
            (line,) = (line for line in self._status.read_text().splitlines() if line.startswith("RssAnon:"))
            self.most_bytes = max(self.most_bytes, int(line.split()[1]) * 1024)


@contextmanager
def _weights_service(folder: Path, host: str = "127.0.0.1") -> "Iterator[tuple[str, subprocess.Popen[bytes]]]":
    address = f"{host}:{free_port(host)}"
    settings = folder / "settings.json"
    settings.write_text(
        json.dumps({"run": {"id": _RUN_ID, "dir": str(folder)}, "rpc": {"weights_address": address}}), "utf-8"
    )
    with _running([sys.executable, "-m", "weights_svc", str(settings)], address) as process:
        yield address, process


@contextmanager
def _raw_server() -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.peers.raw_stream", str(port), str(CHUNK_BYTES)]
    with _running(command, f"127.0.0.1:{port}"):
        yield f"127.0.0.1:{port}"


@contextmanager
def _running(command: list[str], address: str) -> "Iterator[subprocess.Popen[bytes]]":
    """A server's process, from when it answers until it has ended."""
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        with open_channel(address) as channel:
            grpc.channel_ready_future(channel).result(60)
        yield process
    finally:
        process.terminate()
        process.wait()


def _train(config: str, learning_rate: str, folder: str) -> None:
    """A short run that keeps all its versions."""
    command = [sys.executable, "-m", "streamrl.command.main", "run", config, "--json"]
    for setting in (
        f"run.dir={folder}",
        f"run.id={_RUN_ID}",
        f"trainer.learning_rate={learning_rate}",
        "trainer.warmup_steps=0",
        f"trainer.num_iterations={NUM_VERSIONS}",
        f"weights.keep_versions={NUM_VERSIONS + 2}",
        "eval.num_prompts=8",
        "eval.every=0",
    ):
        command += ["--set", setting]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
