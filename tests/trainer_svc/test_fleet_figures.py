import pytest

from streamrl.v1.scheduler_pb2 import (
    INSTANCE_STATE_DEAD,
    INSTANCE_STATE_LIVE,
    GetFleetResponse,
    HeartbeatRequest,
    Instance,
    LengthRecall,
)
from streamrl.v1.weights_pb2 import AcknowledgeRequest, ListVersionsResponse, Receiver
from trainer_svc.fleet_figures import BusyMeter, CutMeter, fleet_size_figures, length_figures, weight_figures


def fleet(*instances: tuple[int, float, float]) -> GetFleetResponse:
    """Incarnation, busy seconds and age of the heartbeat of each."""
    return GetFleetResponse(
        instances=[
            Instance(
                instance=f"generator-{incarnation}",
                incarnation=incarnation,
                state=INSTANCE_STATE_LIVE,
                heartbeat=HeartbeatRequest(busy_s=busy_s, running=2, waiting=3),
                heartbeat_age_s=age_s,
            )
            for incarnation, busy_s, age_s in instances
        ]
    )


def test_idle_is_what_instances_were_not_busy_between_their_heartbeats() -> None:
    meter = BusyMeter()
    meter.add(fleet((1, 100.0, 0.0), (2, 0.0, 0.0)), 10.0, counted=True)
    meter.add(fleet((1, 104.0, 0.0), (2, 1.0, 0.0)), 14.0, counted=True)
    assert meter.idle_share == pytest.approx(1 - 5 / 8)


def test_time_outside_counting_and_a_new_life_do_not_mix_in() -> None:
    meter = BusyMeter()
    meter.add(fleet((1, 0.0, 0.0)), 0.0, counted=True)
    meter.add(fleet((1, 4.0, 0.0)), 4.0, counted=True)
    meter.add(fleet((1, 4.0, 0.0)), 100.0, counted=False)
    meter.add(fleet((1, 4.0, 0.0)), 104.0, counted=True)
    meter.add(fleet((7, 0.0, 0.0)), 108.0, counted=True)
    assert meter.idle_share == 0.0


def test_a_heartbeat_seen_twice_counts_once_and_before_any_nobody_is_idle() -> None:
    meter = BusyMeter()
    assert meter.idle_share == 0.0
    meter.add(fleet((1, 0.0, 0.0)), 0.0, counted=True)
    meter.add(fleet((1, 0.0, 2.0)), 2.0, counted=True)
    assert meter.idle_share == 0.0


def test_dead_instances_are_not_part_of_the_fleet() -> None:
    state = fleet((1, 0.0, 0.0), (2, 0.0, 0.0))
    state.instances[1].state = INSTANCE_STATE_DEAD
    state.moved, state.moved_tokens = 2, 300
    figures = {
        "fleet/instances": 1, "fleet/running": 2, "fleet/waiting": 3, "fleet/moved": 2, "fleet/moved_tokens": 300,
    }  # fmt: skip
    assert fleet_size_figures(state) == figures


def test_what_was_cut_is_told_once_also_of_a_scheduler_that_began_anew() -> None:
    meter = CutMeter()
    assert meter.figures(GetFleetResponse()) == {}
    assert meter.figures(GetFleetResponse(cut=4, cut_tokens=100)) == {"length/cut_mean": 25}
    assert meter.figures(GetFleetResponse(cut=4, cut_tokens=100)) == {}
    assert meter.figures(GetFleetResponse(cut=6, cut_tokens=300)) == {"length/cut_mean": 100}
    assert meter.figures(GetFleetResponse(cut=2, cut_tokens=20)) == {"length/cut_mean": 10}


def test_canaries_count_only_where_there_were_some() -> None:
    versions = ListVersionsResponse(
        receivers=[
            Receiver(receiver="a", acknowledged=AcknowledgeRequest(fetch_s=1.0, switch_s=0.1)),
            Receiver(
                receiver="b",
                acknowledged=AcknowledgeRequest(
                    fetch_s=3.0,
                    switch_s=0.3,
                    canary_abs_diff_mean=1e-5,
                    canary_abs_diff_max=1e-4,
                    canary_num_tokens=20,
                ),
            ),
            Receiver(receiver="c"),
        ],
        bytes_full=10,
        bytes_sent=9,
    )
    assert weight_figures(versions) == {
        "weights/bytes_full": 10,
        "weights/bytes_sent": 9,
        "weights/fetch_s": 2,
        "weights/switch_s": pytest.approx(0.2),
        "mismatch/canary_abs_diff_mean": 1e-5,
        "mismatch/canary_abs_diff_max": 1e-4,
    }
    assert "weights/fetch_s" not in weight_figures(ListVersionsResponse())


def test_recall_of_the_length_ranker_is_a_figure_once_it_is_known() -> None:
    assert length_figures(GetFleetResponse()) == {}
    recall = LengthRecall(num_prompts=64, longest_fifth=0.9, longest_tenth=0.8, longest_twentieth=0.5)
    assert length_figures(GetFleetResponse(length_recall=recall)) == {
        "ranker/recall_longest_20": 0.9,
        "ranker/recall_longest_10": 0.8,
        "ranker/recall_longest_5": 0.5,
    }
