"""Whether a run moves, as its scheduler tells it."""

from collections.abc import Callable

import pytest

from streamrl.progress import fleet_mark
from streamrl.v1.scheduler_pb2 import (
    INSTANCE_STATE_DEAD,
    BatchState,
    GetFleetResponse,
    HeartbeatRequest,
    Instance,
    StepLatency,
)


def _fleet() -> GetFleetResponse:
    beat = HeartbeatRequest(weight_version=3, running=8, step_latencies=[StepLatency(batch_size=8, num_steps=100)])
    return GetFleetResponse(
        instances=[Instance(instance="generator-0", incarnation=7, heartbeat=beat)],
        batches=[BatchState(batch=4, num_samples=32, accepted=8, outstanding=24)],
        newest_weight_version=3,
    )


def _step(fleet: GetFleetResponse) -> None:
    fleet.instances[0].heartbeat.step_latencies[0].num_steps += 1


def _accept(fleet: GetFleetResponse) -> None:
    fleet.batches[0].accepted += 1


def _load(fleet: GetFleetResponse) -> None:
    fleet.instances[0].heartbeat.weight_version += 1


def _register(fleet: GetFleetResponse) -> None:
    fleet.instances.add(instance="generator-1")


@pytest.mark.parametrize("move", [_step, _accept, _load, _register])
def test_what_brings_a_run_on_changes_the_mark(move: Callable[[GetFleetResponse], None]) -> None:
    before, after = _fleet(), _fleet()
    move(after)
    assert fleet_mark(before) != fleet_mark(after)


def _lose_lease(fleet: GetFleetResponse) -> None:
    fleet.instances[0].incarnation += 1
    fleet.instances[0].state = INSTANCE_STATE_DEAD
    fleet.instances[0].heartbeat_age_s += 30


def _dispatch_again(fleet: GetFleetResponse) -> None:
    fleet.redispatched += 24
    fleet.batches[0].undispatched, fleet.batches[0].outstanding = 24, 0


@pytest.mark.parametrize("change", [_lose_lease, _dispatch_again])
def test_what_can_go_round_for_ever_does_not(change: Callable[[GetFleetResponse], None]) -> None:
    before, after = _fleet(), _fleet()
    change(after)
    assert fleet_mark(before) == fleet_mark(after)
