"""Two sites with 100 Mbit/s and 40 ms between them: what crosses the line, and whether anybody waits for it.

The run of examples/two_sites.toml, weights switched in flight: four generators at the far side of the line, two with
real engines and two that only keep time, all fed by one relay. Each site has half of the cores. The run is made in
pairs, on loopback and over the line. The line is between network namespaces: this needs root and iproute2. Two to four
minutes a pair.
"""

import os
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.peers.slow_line import SlowLine
from benchmarks.peers.two_sites import Crossing, SitesRun, Wait, between, tokens_per_s
from benchmarks.result import Cell, Result

NUM_PAIRS = 2
NUM_ITERATIONS = 20
NUM_REAL, NUM_FAKE = 2, 2
LINE_BYTES_PER_S, LINE_ROUND_TRIP_S = 100e6 / 8, 0.04
THROUGHPUT_GOAL = 0.95
TRANSFER_GOAL = 0.9
PAYLOAD_TOLERANCE = 0.02
WAIT_ALLOWANCE_S = 0.15
"""At a switch a sequence may wait so long, beside the load and the recomputation of caches."""
_RUN_TIMEOUT_S = 600.0
_SETTINGS = {
    "weights.swap": "in_flight",
    "trainer.num_iterations": str(NUM_ITERATIONS),
    "eval.every": "0",
    # Versions are made at the end of a batch. For instances to have as much to do then as at other times, more waits
    # for them than they take at once.
    "generator.max_running": "16",
    "pipeline.max_staleness": "2",
}


def measure() -> Result:
    """
    Raises:
        PermissionError: this process may not make network namespaces.
    """
    if os.geteuid() != 0:
        raise PermissionError("benchmark `sites` makes network namespaces: run it as root")
    runs: dict[str, list[_Outcome]] = {"loopback": [], "line": []}
    for pair in range(NUM_PAIRS):
        # Every other pair the other way round, so that what changes with time counts for both.
        for place in ("loopback", "line") if pair % 2 == 0 else ("line", "loopback"):
            runs[place].append(_run(over_line=place == "line"))
    settings = {
        "pairs": NUM_PAIRS,
        "iterations": NUM_ITERATIONS,
        "real_engines": NUM_REAL,
        "fake_engines": NUM_FAKE,
        "bytes_per_s": LINE_BYTES_PER_S,
        "round_trip_s": LINE_ROUND_TRIP_S,
        "settings": _SETTINGS,
    }
    return Result("sites", settings, [*_line_cells(runs["line"]), *_pace_cells(**runs), *_wait_cells(runs["line"])])


@dataclass(frozen=True)
class _Outcome:
    """One run."""

    summary: dict[str, Any]
    crossings: list[Crossing]
    waits: list[Wait]
    interface_bytes: int
    """To the far side: weights, assignments, control."""
    bytes_full: int
    """What the origin sent to the relay, differences counted as the whole tensors that they stand for."""
    during: float
    """Tokens a second while a version crosses."""
    between: float

    @property
    def num_copies(self) -> float:
        """Copies of each version that were sent."""
        return self.bytes_full / sum(crossing.full_bytes for crossing in self.crossings)


def _run(*, over_line: bool) -> _Outcome:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        line: SlowLine | None = None
        if over_line:
            line = stack.enter_context(SlowLine(bytes_per_s=LINE_BYTES_PER_S, round_trip_s=LINE_ROUND_TRIP_S))
        run = stack.enter_context(SitesRun(folder, line, _SETTINGS, num_real=NUM_REAL, num_fake=NUM_FAKE))
        summary = run.finish(_RUN_TIMEOUT_S)
        rollouts, crossings, pauses = run.rollouts(), run.crossings(), run.pauses()
        # The first version is fetched before anything is generated, and behind the last one nothing is.
        crossing = [(one.started_s, one.finished_s) for one in crossings[1:-1]]
        return _Outcome(
            summary,
            crossings,
            run.waits(),
            0 if line is None else line.to_far.num_bytes,
            run.traffic().bytes_full,
            tokens_per_s(rollouts, pauses, crossing),
            tokens_per_s(rollouts, pauses, list(between(crossing))),
        )


def _line_cells(runs: list[_Outcome]) -> list[Cell]:
    """What crossed, a version."""
    copies = mean(run.num_copies for run in runs)
    whole = mean(crossing.full_bytes for run in runs for crossing in run.crossings)
    payload = mean(crossing.payload_bytes for run in runs for crossing in run.crossings)
    took = mean(crossing.finished_s - crossing.started_s for run in runs for crossing in run.crossings)
    interface = mean(run.interface_bytes / len(run.crossings) for run in runs)
    return [
        Cell("version/bytes", whole, "bytes"),
        Cell.limited("version/off_one_copy", abs(copies - 1), "of a copy", limit=PAYLOAD_TOLERANCE),
        Cell("version/copies", copies, "copies sent, a difference counted as what it stands for"),
        Cell("version/payload", payload / whole, "of the full size"),
        Cell("version/interface", interface / whole, "of the full size, with all other traffic to the far side"),
        Cell("version/took", took, "s, from the negotiation to the last checked byte"),
    ]


def _pace_cells(loopback: list[_Outcome], line: list[_Outcome]) -> list[Cell]:
    rates = {
        name: mean(run.summary["samples_per_s"] for run in runs)
        for name, runs in (("loopback", loopback), ("line", line))
    }
    return [
        Cell("samples/loopback", rates["loopback"], "samples/s"),
        Cell.compared(
            "samples/line",
            rates["line"],
            "samples/s",
            against="samples/loopback",
            peer=rates["loopback"],
            goal=THROUGHPUT_GOAL,
        ),
        Cell("tokens/between", mean(run.between for run in line), "tokens/s between transfers"),
        Cell.compared(
            "tokens/during",
            mean(run.during for run in line),
            "tokens/s during transfers",
            against="tokens/between",
            peer=mean(run.between for run in line),
            goal=TRANSFER_GOAL,
        ),
    ]


def _wait_cells(runs: list[_Outcome]) -> list[Cell]:
    """Switches under running sequences."""
    waits = [wait for run in runs for wait in run.waits]
    if not waits:
        return [Cell("switch/number", 0, "switches under running sequences")]
    beside = max(wait.longest_s - wait.pause_s - wait.recompute_s for wait in waits)
    return [
        Cell("switch/number", len(waits), "switches under running sequences"),
        Cell("switch/load", max(wait.pause_s for wait in waits), "s, the longest"),
        Cell("switch/recompute", max(wait.recompute_s for wait in waits), "s, the longest"),
        Cell("switch/wait", max(wait.longest_s for wait in waits), "s, the longest of any sequence"),
        Cell.limited("switch/wait_beside_load_and_recompute", beside, "s, the most", limit=WAIT_ALLOWANCE_S),
    ]
