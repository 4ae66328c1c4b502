"""A run on emulated devices, as fast as the services can."""

from contextlib import closing

import pytest

from benchmarks.emulation.fleet import WARM_UP_ITERATIONS, Nursery, run_emulated
from benchmarks.emulation.plan import Emulation


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "global_barrier", "staleness_max"),
    [
        ({"pipeline.mode": "colocated"}, False, 0),
        ({"pipeline.mode": "sync"}, False, 0),
        ({"pipeline.mode": "async", "weights.swap": "in_flight"}, False, 1),
        ({"pipeline.mode": "async"}, True, 1),
    ],
)
def test_emulated_services_train_every_sample_of_every_batch(
    settings: dict[str, str], global_barrier: bool, staleness_max: int
) -> None:
    emulation = Emulation(
        # Looks at the processes are half a second apart, and two must fall into the one iteration that counts.
        speed=100.0,
        longest_answer=500,
        max_running=64,
        step_ms={1: 300.0, 64: 400.0},
        prefill_token_ms=1.0,
        load_s=1.0,
        train_token_s=1e-3,
        global_barrier=global_barrier,
    )
    with closing(Nursery()) as nursery:
        state = run_emulated(nursery, emulation, WARM_UP_ITERATIONS + 1, settings)
    assert state.iteration_s > 0
    assert state.staleness_max == staleness_max
    assert state.busy_cores > 0
    # A thousandth of a second for each token of 1,024 answers and prompts of five tokens.
    assert state.train_s == pytest.approx(1e-3 * 1024 * (125 + 5), rel=0.2)
