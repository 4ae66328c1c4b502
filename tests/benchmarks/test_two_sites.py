"""What benchmark `sites` reads out of a run: logs as services write them, and rates inside of stretches of time."""

import logging
from pathlib import Path

import pytest

from benchmarks.peers.two_sites import Wait, between, crossings_of, pauses_of, tokens_per_s, waits_of
from generator_svc.interruptions import Interruption
from streamrl.v1.records_pb2 import Rollout, RolloutTimings
from streamrl.v1.weights_pb2 import ModelFile
from tests.weights_svc.running_service import RunningService, make_data, wait_until


def test_crossings_are_read_from_what_a_relay_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    origin = RunningService(tmp_path / "origin")
    relay = RunningService(tmp_path / "relay", upstream=origin.address, site="far")
    try:
        origin.publish(0, make_data(0), files=[ModelFile(name="config.json", content=b"{}")])
        wait_until(lambda: relay.versions() == [0])
        wait_until(lambda: "has come from" in caplog.text)
    finally:
        relay.stop()
        origin.stop()
    log = "\n".join(
        f"2026-11-30T02:36:53.250Z relay INFO {record.name}: {record.getMessage()}" for record in caplog.records
    )
    (crossing,) = crossings_of(log)
    assert (crossing.weight_version, crossing.payload_bytes, crossing.full_bytes) == (0, 5000, 5000)
    assert crossing.finished_s % 1 == 0.25
    assert crossing.started_s <= crossing.finished_s


def test_waits_are_read_from_what_an_instance_logs():
    told = Interruption(num_sequences=24, pause_s=0.02, recompute_s=0.07, longest_wait_s=0.1)
    assert waits_of(f"2026-11-30T02:36:53.250Z generator-0 INFO generator_svc.vllm_steps: {told}\n") == [
        Wait(longest_s=0.1, pause_s=0.02, recompute_s=0.07)
    ]


def test_pauses_are_read_from_what_an_instance_logs():
    told = "version=2 loaded: fetched in 0.10 s, switched in 0.250 s"
    ((start_s, end_s),) = pauses_of(f"2026-11-30T06:44:53.250Z generator-0 INFO generator_svc.weight_switch: {told}\n")
    assert (start_s % 60, end_s % 60) == (53.0, 53.25)


def test_tokens_count_where_they_were_drawn():
    rollouts = [
        Rollout(instance="a", token_ids=[1] * 100, timings=RolloutTimings(started_s=0.0, finished_s=10.0)),
        Rollout(instance="a", token_ids=[1] * 20, timings=RolloutTimings(started_s=2.0, finished_s=4.0)),
    ]
    transfers = [(1.0, 3.0), (5.0, 6.0), (6.0, 7.0)]
    assert tokens_per_s(rollouts, {"a": []}, transfers) == pytest.approx((20 + 10 + 10 + 10) / 4)
    assert list(between(transfers)) == [(3.0, 5.0)]
    assert tokens_per_s(rollouts, {"a": []}, [(3.0, 5.0)]) == pytest.approx((20 + 10) / 2)


def test_an_instance_that_pauses_draws_nothing():
    rollout = Rollout(instance="a", token_ids=[1] * 80, timings=RolloutTimings(started_s=0.0, finished_s=10.0))
    pauses = {"a": [(-2.0, -1.0), (1.0, 2.0), (9.0, 11.0)]}
    assert tokens_per_s([rollout], pauses, [(0.0, 1.0)]) == pytest.approx(10)
    assert tokens_per_s([rollout], pauses, [(1.0, 2.0)]) == 0
    assert tokens_per_s([rollout], pauses, [(8.0, 10.0)]) == pytest.approx(10 / 2)
