"""Two sites on one machine, each with its Apache Kafka, MirrorMaker 2 in both directions, every service by `serve`."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamrl import lifetime
from streamrl.command.apache_kafka import KafkaDownload
from streamrl.command.broker import EmbeddedBroker
from streamrl.command.ports import free_port
from streamrl.kafka.connection import Connection
from streamrl.kafka.topic_states import TopicState, topic_states
from streamrl.kafka.topics import Topics
from streamrl.rpc.channel import open_channel
from streamrl.settings import KafkaSection
from streamrl.v1.trainer_pb2 import TrainerServiceGetStatusRequest
from streamrl.v1.trainer_pb2_grpc import TrainerServiceStub

pytestmark = [pytest.mark.e2e, pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(900)]

EXAMPLES = Path(__file__).parents[2] / "examples"
SERVICES = {
    "weights": ("weights", "training"),
    "scheduler": ("scheduler", "training"),
    "trainer": ("trainer", "training"),
    "relay": ("weights", "generation"),
    "generator-0": ("generator", "generation"),
    "generator-1": ("generator", "generation"),
}
TOPICS = Topics("two-sites")
AddsUp = Callable[[dict[str, Any]], None]


class TwoSites:
    """Brokers, mirrors and services of examples/two_sites.toml."""

    def __init__(self, folder: Path, download: KafkaDownload, settings: dict[str, str]) -> None:
        self.run_folder = folder / "runs" / "two-sites"
        self._folder = folder
        self._download = download
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = contextlib.ExitStack()
        self.brokers = {site: self._start_broker(site) for site in ("training", "generation")}
        for broker in self.brokers.values():
            broker.wait_ready()
        self.trainer_address, scheduler, weights, relay = (f"127.0.0.1:{free_port()}" for _ in range(4))
        self._settings = {
            "run.dir": str(folder / "runs"),
            "rpc.trainer_address": self.trainer_address,
            "rpc.scheduler_address": scheduler,
            "rpc.weights_address": weights,
            "sites.generation.scheduler": scheduler,
            "sites.generation.weights": relay,
            **{f"sites.{site}.kafka.bootstrap_servers": broker.address for site, broker in self.brokers.items()},
            **settings,
        }

    def start_mirror(self, name: str) -> None:
        """Carries topics one way: `out` to the generators, or `back`."""
        source, target = ("training", "generation") if name == "out" else ("generation", "training")
        topics = mirrored_topics()[f"{source}->{target}"]
        lines = (f"{target}.producer.max.request.size=8388608", "offset.flush.interval.ms=5000")
        self._start(
            name,
            [
                str(self._download.home / "mirror"),
                *("--dir", str(self._folder / f"mirror-{name}")),
                *("--from", f"{source}={self.brokers[source].address}"),
                *("--to", f"{target}={self.brokers[target].address}"),
                *("--topics", topics),
                *(part for line in lines for part in ("--set", line)),
            ],
        )

    def start_service(self, instance: str) -> None:
        service, site = SERVICES[instance]
        command = [sys.executable, "-m", "streamrl.command.main", "serve", service, str(EXAMPLES / "two_sites.toml")]
        command += ["--site", site, "--instance", instance]
        for name, value in self._settings.items():
            command += ["--set", f"{name}={value}"]
        self._start(instance, command)

    def kill(self, name: str) -> None:
        """SIGKILL to a mirror, to the broker of a site, or to a service with the command that serves it: whatever kills
        a pod kills all of it."""
        process = self.brokers[name].process if name in self.brokers else self._processes[name]
        below = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for child in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.wait()
        psutil.wait_procs(below)

    def start_again(self, name: str) -> None:
        """What was killed."""
        if name in self.brokers:
            self.brokers[name].start_again()
        elif name in ("out", "back"):
            self.start_mirror(name)
        else:
            self.start_service(name)

    def iteration(self) -> int:
        """Trainer iterations done; -1: it does not answer."""
        with open_channel(self.trainer_address) as channel:
            try:
                return TrainerServiceStub(channel).GetStatus(TrainerServiceGetStatusRequest(), timeout=2).iteration
            except Exception:  # it may be starting, or gone
                return -1

    def wait_for_iteration(self, iteration: int, timeout_s: float = 400) -> None:
        deadline = time.monotonic() + timeout_s
        while self.iteration() < iteration:
            assert time.monotonic() < deadline, f"iteration {iteration} does not come: {self.log()}"
            assert self._processes["trainer"].poll() is None, f"the trainer ended: {self.log()}"
            time.sleep(0.2)

    def finish(self, timeout_s: float = 600) -> dict[str, Any]:
        """Waits for the end of the trainer and returns the summary."""
        assert self._processes["trainer"].wait(timeout_s) == 0, self.log()
        summary: dict[str, Any] = json.loads((self.run_folder / "summary.json").read_text())
        return summary

    def topics_at(self, site: str) -> dict[str, TopicState]:
        """The run's topics in the cluster of a site."""
        connection = Connection(KafkaSection(bootstrap_servers=self.brokers[site].address), "test")
        return {state.topic: state for state in topic_states(connection, TOPICS.all)}

    def log(self) -> str:
        return "\n".join(
            f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in sorted(self._folder.glob("*.log"))
        )

    def close(self) -> None:
        for name in reversed(self._processes):
            self._processes[name].terminate()
        for process in self._processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._stack.close()

    def _start_broker(self, site: str) -> EmbeddedBroker:
        return self._stack.enter_context(
            EmbeddedBroker.start(
                KafkaSection(embedded="apache"),
                data=self._folder / f"kafka-{site}",
                log=self._folder / f"kafka-{site}.log",
            )
        )

    def _start(self, name: str, command: list[str]) -> None:
        log = self._folder / f"{name}.log"
        self._processes[name] = lifetime.spawn(command, log=log, with_signal=signal.SIGTERM)


def mirrored_topics() -> dict[str, str]:
    """Direction to the topics that the example's MirrorMaker carries, a regular expression."""
    text = (EXAMPLES / "two_sites.properties").read_text()
    return {way: topics.replace("\\\\", "\\") for way, topics in re.findall(r"(?m)^(\S+->\S+)\.topics = (.+)$", text)}


StartSites = Callable[..., TwoSites]


@pytest.fixture
def start_sites(kafka_download: KafkaDownload, tmp_path: Path) -> Iterator[StartSites]:
    started: list[TwoSites] = []

    def start(settings: dict[str, str]) -> TwoSites:
        sites = TwoSites(tmp_path, kafka_download, settings)
        started.append(sites)
        for mirror in ("out", "back"):
            sites.start_mirror(mirror)
        for instance in SERVICES:
            sites.start_service(instance)
        return sites

    if not (kafka_download.home / "mirror").is_file():
        pytest.skip("KAFKA_HOME has no command `mirror`")
    yield start
    for sites in started:
        sites.close()


def assert_topics_as_drawn(sites: TwoSites) -> None:
    """Prompts stay home; of the others each site has a copy, of as many partitions."""
    training, generation = sites.topics_at("training"), sites.topics_at("generation")
    assert training.keys() == set(TOPICS.all)
    assert generation.keys() == set(TOPICS.of_generation_site)
    assert all(training[name].partitions == state.partitions for name, state in generation.items())


def test_the_example_learns_across_sites_though_a_mirror_is_killed(
    start_sites: StartSites, assert_adds_up: AddsUp
) -> None:
    sites = start_sites({"trainer.num_iterations": "20", "eval.every": "0"})
    sites.wait_for_iteration(3)
    sites.kill("back")
    sites.start_again("back")
    sites.wait_for_iteration(8)
    sites.kill("out")
    sites.start_again("out")
    summary = sites.finish()
    assert_adds_up(summary)
    assert summary["status"] == "completed"
    assert summary["eval"]["first"] <= 0.6
    assert summary["eval"]["last"] >= 0.85
    assert summary["rollouts"]["trained"] == 20 * 32 * 8
    # For both generators one copy a version crossed the line, and that as a difference but for the first.
    version_bytes = max(file.stat().st_size for file in (sites.run_folder / "weights").glob("*.safetensors"))
    assert summary["weights"]["bytes_full"] <= 21 * version_bytes
    assert summary["weights"]["bytes_sent"] < 0.9 * summary["weights"]["bytes_full"]
    assert sum(summary["rollouts"]["dropped"].values()) == 0
    assert summary["staleness_max"] == 1
    assert_topics_as_drawn(sites)


def test_every_sample_is_trained_once_whatever_dies_at_either_site(
    start_sites: StartSites, assert_adds_up: AddsUp
) -> None:
    sites = start_sites(
        {
            "generator.engine": "fake",
            "generator.fake_step_ms": "{ 1 = 8.0, 64 = 16.0 }",
            "trainer.num_iterations": "20",
            "trainer.checkpoint_every": "2",
            "eval.num_prompts": "32",
            "eval.every": "0",
            "scheduler.lease_s": "4",
        }
    )
    for iteration, name in enumerate(
        ("back", "out", "generator-1", "scheduler", "weights", "relay", "generation", "trainer"), 1
    ):
        sites.wait_for_iteration(2 * iteration)
        sites.kill(name)
        sites.start_again(name)
    summary = sites.finish()
    assert_adds_up(summary)
    assert summary["status"] == "completed"
    assert summary["rollouts"]["trained"] == 20 * 32 * 8
    assert summary["staleness_max"] <= 1
    assert summary["attempts"] == 2
    assert_topics_as_drawn(sites)
