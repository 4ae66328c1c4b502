"""When a run that stands still is ended, and with which words."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from streamrl.command.observer import Observation
from streamrl.command.watchdog import ProcessView, Watchdog, who_waits
from streamrl.v1.scheduler_pb2 import BatchState, GetFleetResponse, HeartbeatRequest, Instance
from streamrl.v1.trainer_pb2 import TrainerServiceGetStatusResponse

LIMIT_S = 60.0
WAITING = TrainerServiceGetStatusResponse(state="waiting", waits_for="rollouts of batch 4: 0 of 32", iteration=4)
FLEET = GetFleetResponse(
    instances=[Instance(instance="generator-0", pid=12, heartbeat=HeartbeatRequest(weight_version=2))],
    batches=[BatchState(batch=4, num_samples=32)],
    waits=["batch 4 waits for version 3"],
)
STILL = Observation(WAITING, FLEET, registered_pids=frozenset([12]))
PROCESSES = {
    name: ProcessView(name.partition("-")[0], name, pid, own_cpu_s=10.0, tree_cpu_s=20.0)
    for pid, name in enumerate(("trainer", "scheduler", "generator-0", "weights", "broker"), 10)
}


def _ends(watchdog: Watchdog, observations: Iterator[tuple[Observation, list[ProcessView]]]) -> tuple[int, str] | None:
    """The second at which the watchdog ends a run that is looked at every second, and its sentence."""
    for now_s, (observation, processes) in enumerate(observations):
        wanted = watchdog.wants_processes(now_s)
        if (sentence := watchdog.look(observation, processes if wanted else [], now_s)) is not None:
            return now_s, sentence
    return None


def _for_seconds(
    seconds: int, observation: Observation = STILL, **cpu_share: float
) -> Iterator[tuple[Observation, list[ProcessView]]]:
    """The same observation again and again, while processes (by instance) use a share of a core."""
    for second in range(seconds):
        yield (
            observation,
            [
                replace(
                    process,
                    own_cpu_s=process.own_cpu_s + second * cpu_share.get(process.instance.replace("-", "_"), 0.01),
                    tree_cpu_s=process.tree_cpu_s + second * cpu_share.get(process.instance.replace("-", "_"), 0.01),
                )
                for process in PROCESSES.values()
            ],
        )


def test_a_run_in_which_all_wait_is_ended_with_who_waits_for_whom() -> None:
    ended = _ends(Watchdog(LIMIT_S, 0), _for_seconds(300))
    assert ended is not None
    second, sentence = ended
    # The first look finds what the processes have worked before.
    assert LIMIT_S <= second <= LIMIT_S + 2 * LIMIT_S / 4
    assert sentence.startswith("nothing has moved for 6")
    waits = "trainer waits for rollouts of batch 4: 0 of 32; scheduler: batch 4 waits for version 3"
    assert f"(run.no_progress_s): {waits}" in sentence


def test_no_limit_is_no_watchdog() -> None:
    watchdog = Watchdog(0, 0)
    assert not watchdog.wants_processes(10**6)
    assert _ends(watchdog, _for_seconds(10_000)) is None


@pytest.mark.parametrize("name", ["trainer", "weights"])
def test_a_process_that_works_is_waited_for(name: str) -> None:
    assert _ends(Watchdog(LIMIT_S, 0), _for_seconds(600, **{name: 0.2})) is None


def test_an_engine_that_starts_works_and_one_that_has_registered_must_show_steps() -> None:
    starting = replace(STILL, registered_pids=frozenset())
    assert _ends(Watchdog(LIMIT_S, 0), _for_seconds(600, starting, generator_0=0.9)) is None
    assert _ends(Watchdog(LIMIT_S, 0), _for_seconds(600, STILL, generator_0=0.9)) is not None


@pytest.mark.parametrize("name", ["scheduler", "broker"])
def test_those_that_only_serve_do_not_keep_a_run_alive(name: str) -> None:
    assert _ends(Watchdog(LIMIT_S, 0), _for_seconds(600, **{name: 1.0})) is not None


def test_steps_of_an_engine_are_motion() -> None:
    def generating() -> Iterator[tuple[Observation, list[ProcessView]]]:
        for second, (_, processes) in enumerate(_for_seconds(600)):
            beat = HeartbeatRequest(generated_tokens=second // 50)
            fleet = GetFleetResponse(instances=[Instance(instance="generator-0", pid=12, heartbeat=beat)])
            yield Observation(WAITING, fleet, registered_pids=frozenset([12])), processes

    assert _ends(Watchdog(LIMIT_S, 0), generating()) is None


def test_services_that_are_away_now_and_then_are_no_motion() -> None:
    def flapping() -> Iterator[tuple[Observation, list[ProcessView]]]:
        for second, (_, processes) in enumerate(_for_seconds(600)):
            yield (replace(STILL, fleet=None, trainer=None) if second % 20 < 5 else STILL), processes

    assert _ends(Watchdog(LIMIT_S, 0), flapping()) is not None


def test_a_paused_run_is_left_alone() -> None:
    paused = Observation(TrainerServiceGetStatusResponse(state="paused", iteration=4), FLEET)
    assert _ends(Watchdog(LIMIT_S, 0), _for_seconds(600, paused)) is None
    silent = replace(paused, trainer_answers=False)
    assert _ends(Watchdog(LIMIT_S, 0), _for_seconds(600, silent)) is not None


def test_the_silent_and_the_stopped_are_named() -> None:
    stopped = replace(PROCESSES["generator-0"], is_stopped=True)
    late = replace(PROCESSES["generator-0"], instance="generator-1", pid=99)
    silent = Observation(WAITING, None, trainer_answers=False, weights_answers=False, registered_pids=frozenset([12]))
    assert list(who_waits(silent, [stopped, late])) == [
        "trainer does not answer (it waited for rollouts of batch 4: 0 of 32)",
        "scheduler does not answer",
        "weights does not answer",
        "generator-0 (pid 12) is stopped by a signal",
        "generator-1 has not registered",
    ]


@pytest.mark.parametrize(
    ("trainer", "answers", "words"),
    [
        (None, True, "trainer is starting"),
        (TrainerServiceGetStatusResponse(state="training"), True, "trainer is training"),
        (TrainerServiceGetStatusResponse(state="training"), False, "trainer does not answer"),
        (TrainerServiceGetStatusResponse(state="starting", waits_for="data"), True, "trainer is starting, data"),
    ],
)
def test_a_trainer_that_waits_for_nobody_is_described(
    trainer: TrainerServiceGetStatusResponse | None, answers: bool, words: str
) -> None:
    assert next(who_waits(Observation(trainer, FLEET, trainer_answers=answers), [])) == words
