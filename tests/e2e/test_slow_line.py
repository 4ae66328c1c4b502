"""A run whose generators stand behind a line of 100 Mbit/s and 40 ms, in a network namespace of their own."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.slow_line import SlowLine
from benchmarks.peers.two_sites import SitesRun

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None or not Path("/dev/net/tun").exists(),
        reason="network namespaces need root, iproute2 and TUN devices",
    ),
]

NUM_ITERATIONS = 8


@pytest.fixture
def line() -> Iterator[SlowLine]:
    with SlowLine(bytes_per_s=100e6 / 8, round_trip_s=0.04) as line:
        yield line


@pytest.mark.parametrize("anchor_every", [1, 100], ids=["whole", "differences"])
def test_each_version_crosses_once_for_four_generators_and_is_switched_under_running_answers(
    line: SlowLine, tmp_path: Path, assert_adds_up: Callable[[dict[str, Any]], None], anchor_every: int
) -> None:
    settings = {
        "weights.swap": "in_flight",
        "weights.anchor_every": str(anchor_every),
        "trainer.num_iterations": str(NUM_ITERATIONS),
        "eval.every": "0",
    }
    with SitesRun(tmp_path, line, settings, num_real=2, num_fake=2) as run:
        summary = run.finish(600)
        crossings, rollouts, traffic = run.crossings(), run.rollouts(), run.traffic()
    assert_adds_up(summary)
    assert summary["status"] == "completed"
    assert summary["rollouts"]["trained"] == NUM_ITERATIONS * 32 * 8
    assert summary["staleness_max"] <= 1
    assert len(crossings) >= NUM_ITERATIONS - 1
    assert traffic.bytes_full == pytest.approx(sum(crossing.full_bytes for crossing in crossings), rel=0.02)
    assert traffic.bytes_sent == pytest.approx(sum(crossing.payload_bytes for crossing in crossings), rel=0.02)
    if anchor_every == 1:
        assert traffic.bytes_sent == traffic.bytes_full
    else:
        assert traffic.bytes_sent < 0.9 * traffic.bytes_full
    assert line.to_far.num_bytes < 2 * traffic.bytes_full
    # Every instance took part, and answers went on under a newer version than they had begun with.
    assert {rollout.instance for rollout in rollouts} == {f"generator-{index}" for index in range(4)}
    assert any(len(rollout.version_spans) > 1 for rollout in rollouts if rollout.instance == "generator-0")
