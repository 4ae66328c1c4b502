"""How modes of a throughput measurement are set beside each other."""

import threading
from collections.abc import Mapping
from typing import Any, cast

import pytest

from benchmarks import throughput
from benchmarks.emulation.fleet import Nursery, SteadyState
from benchmarks.emulation.plan import Emulation
from benchmarks.emulation.stages import LENGTH_SETS, Stages


def test_few_runs_go_on_at_once_and_each_mode_is_told_with_its_own_split(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, under_way, most_at_once = threading.Lock(), 0, 0
    full = threading.Barrier(throughput.AT_ONCE, timeout=10)

    def run_emulated(_nursery: Nursery, _emulation: Emulation, _iterations: int, _settings: Mapping[str, Any]) -> Any:
        nonlocal under_way, most_at_once
        with lock:
            under_way += 1
            most_at_once = max(most_at_once, under_way)
        full.wait()
        with lock:
            under_way -= 1
        return SteadyState(100.0, 90.0, 0.1, 0.5, 1, 30.0)

    monkeypatch.setattr(throughput, "run_emulated", run_emulated)
    cells = {cell.name: cell for cell in throughput.emulated_cells(Stages(LENGTH_SETS[2]), cast(Nursery, None))}
    assert most_at_once == throughput.AT_ONCE
    assert cells["20K/async"].ratio == 1.0
    assert cells["20K/async"].met is False
    generating = {
        mode: int(cells[f"20K/{mode}"].unit.split(" on ")[1].split("+")[0]) for mode in throughput.ASYNC_MODES
    }
    assert generating["async"] > generating["async_at_boundaries"]
    # 100 s on 16 devices are more on fewer ones.
    assert cells["20K/async_at_boundaries/T_gen"].value > 100.0
    assert cells["20K/async/over_bound"].value == pytest.approx(100.0 / cells["20K/async/T_gen"].value)
