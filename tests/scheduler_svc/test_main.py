"""scheduler_svc as a process, between a real broker, real gRPC and scripted peers."""

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from streamrl.batch_progress import progress_proto
from streamrl.identity import PURPOSE_EVALUATION, PURPOSE_TRAIN, SampleKey
from streamrl.settings import KafkaSection
from streamrl.v1.records_pb2 import BatchEnd, DeadLetter, PromptRecord, RunEnd
from streamrl.v1.sample_pb2 import AnswerPrefix, VersionSpan
from streamrl.v1.scheduler_pb2 import (
    FLEET_PHASE_TRAIN,
    INSTANCE_STATE_DRAINING,
    ClosedBatch,
    GetFleetRequest,
    GivenBack,
    RegisterRequest,
    StepLatency,
)
from tests.scheduler_svc.scripted_peers import SchedulerProcess, free_address, wait_until

Start = Callable[..., SchedulerProcess]


@pytest.fixture
def start(tmp_path: Path, kafka_settings: KafkaSection, request: pytest.FixtureRequest) -> Iterator[Start]:
    """Starts a scheduler with settings; each test has its own run."""
    started: list[SchedulerProcess] = []

    def start(**settings: dict[str, object]) -> SchedulerProcess:
        run_id = f"scheduler-{request.node.name[:80]}".replace("_", "-")
        started.append(SchedulerProcess(tmp_path, kafka_settings, run_id, **settings))
        return started[-1]

    yield start
    for scheduler in started:
        scheduler.close()


def _keys(batch: int, num_groups: int, purpose: int = PURPOSE_TRAIN) -> list[SampleKey]:
    return [SampleKey(purpose, batch, group, 0) for group in range(num_groups)]


def test_a_run_from_the_first_prompt_to_the_last_closed_batch(start: Start) -> None:
    scheduler = start(generator={"num_instances": 2})
    scheduler.write_batch(0, 16)
    scheduler.write_batch(1, 16)
    scheduler.write_batch(2, 16)
    scheduler.write_batch(0, 4, purpose=PURPOSE_EVALUATION)
    first = scheduler.instance("generator-0")
    scheduler.wait_for("1 of 2 instances registered")
    scheduler.wait_for("batch 0 waits for version 0")
    scheduler.wait_for("the trainer has not reported to this scheduler yet")
    scheduler.weights.announce(0)
    second = scheduler.instance("generator-1")
    scheduler.report(complete=True)

    shares = [first.samples(), second.samples()]
    assert [len(share) for share in shares] == [18, 18]
    assert sorted(shares[0] + shares[1]) == sorted([*_keys(0, 16), *_keys(1, 16), *_keys(0, 4, PURPOSE_EVALUATION)])
    priorities = [(a.priority, a.purpose, a.batch) for a in (*first.assignments(), *second.assignments())]
    assert [key[1:] for key in sorted(priorities)] == [
        *[(PURPOSE_EVALUATION, 0)] * 4, *[(PURPOSE_TRAIN, 0)] * 16, *[(PURPOSE_TRAIN, 1)] * 16
    ]  # fmt: skip
    scheduler.wait_for("batch 2 waits for version 1")
    num_heard = len(first.heard)

    scheduler.weights.announce(1)
    wait_until(lambda: len(first.samples()) == 26 and len(second.samples()) == 26)
    assert first.heard[-1].newest_weight_version == 1
    assert len(first.heard) > num_heard

    for batch in range(3):
        closed = [ClosedBatch(purpose=PURPOSE_TRAIN, batch=batch)]
        scheduler.report(_keys(batch, 16), closed=closed)
    closed = [ClosedBatch(purpose=PURPOSE_EVALUATION, batch=0)]
    scheduler.report(_keys(0, 4, PURPOSE_EVALUATION), closed=closed)
    scheduler.write(PromptRecord(attempt=1, run_end=RunEnd()))
    scheduler.wait_for("all batches are over")
    fleet = scheduler.fleet()
    assert [instance.outstanding for instance in fleet.instances] == [0, 0]
    assert not fleet.batches
    assert scheduler.close() == 0


def test_the_samples_of_an_instance_that_falls_silent_go_to_the_other(start: Start) -> None:
    scheduler = start(generator={"num_instances": 2})
    scheduler.weights.announce(0)
    scheduler.report(complete=True)
    victim, survivor = scheduler.instance("generator-0"), scheduler.instance("generator-1")
    scheduler.write_batch(0, 8)
    lost = victim.samples()
    scheduler.report(lost[:1])
    victim.fall_silent()
    wait_until(lambda: len(survivor.samples()) == 7)
    again = [assignment for assignment in survivor.assignments() if assignment.draws[0].dispatch == 2]
    assert sorted(SampleKey(a.purpose, a.batch, a.group, 0) for a in again) == lost[1:]
    assert scheduler.report().redispatched == 3
    assert not victim.try_heartbeat().lease_granted


def test_what_a_draining_instance_gives_back_goes_to_the_other(start: Start) -> None:
    scheduler = start(generator={"num_instances": 2})
    scheduler.weights.announce(0)
    scheduler.report(complete=True)
    leaving, staying = scheduler.instance("generator-0"), scheduler.instance("generator-1")
    scheduler.write_batch(0, 8)
    samples = leaving.samples()
    leaving.drain(stopped=False)
    wait_until(lambda: scheduler.fleet().instances[0].state == INSTANCE_STATE_DRAINING)
    leaving.say(draining=True, revoked=[GivenBack(id=key.to_proto()) for key in samples])
    wait_until(lambda: len(staying.samples()) == 8)
    leaving.drain(stopped=True)


def test_answers_that_run_are_asked_for_by_their_progress_and_go_on_elsewhere(start: Start) -> None:
    scheduler = start()
    scheduler.weights.announce(0)
    scheduler.report(complete=True)
    crowded = scheduler.instance("generator-0")
    scheduler.write_batch(0, 8, max_tokens=20_000)
    samples = crowded.samples()
    steps = [StepLatency(batch_size=size, latency_s=0.01 * size, num_steps=100) for size in (1, 2, 4, 8)]
    crowded.state = {"running": 8, "progress": progress_proto(dict.fromkeys(samples, 1000)), "step_latencies": steps}
    idle = scheduler.instance("generator-1")
    asked = wait_until(lambda: next((list(answer.hand_over) for answer in crowded.heard if answer.hand_over), None))
    prefix = AnswerPrefix(
        token_ids=range(1000), logprobs=[-1.0] * 1000, version_spans=[VersionSpan(weight_version=0, num_tokens=1000)]
    )
    crowded.say(revoked=[GivenBack(id=sample_id, dispatch=1, prefix=prefix) for sample_id in asked])
    wait_until(lambda: len(idle.samples()) == len(asked))
    for assignment in idle.assignments():
        (draw,) = assignment.draws
        assert (draw.dispatch, len(draw.prefix.token_ids)) == (2, 1000)
    assert wait_until(lambda: scheduler.fleet().moved) == len(asked)


def test_a_restarted_scheduler_dispatches_only_what_is_still_wanted_and_nothing_twice(start: Start) -> None:
    scheduler = start()
    scheduler.weights.announce(0)
    incarnation = scheduler.report(complete=True).scheduler_incarnation
    instance = scheduler.instance("generator-0")
    scheduler.write_batch(0, 6)
    assert instance.samples() == _keys(0, 6)
    old_place = instance.place

    scheduler.kill_and_restart()
    assert not instance.try_heartbeat().lease_granted
    instance.join()
    assert instance.place.incarnation > old_place.incarnation
    assert scheduler.report(_keys(0, 6)[:1]).scheduler_incarnation > incarnation
    scheduler.wait_for("the trainer has not reported to this scheduler yet")
    scheduler.report(_keys(0, 6)[:4], complete=True)
    assert instance.samples() == _keys(0, 6)[4:]


def test_announcements_go_on_when_weights_svc_was_away(start: Start) -> None:
    scheduler = start()
    scheduler.weights.announce(0)
    wait_until(lambda: scheduler.fleet().HasField("newest_weight_version"))
    scheduler.weights.stop()
    scheduler.weights.start()
    scheduler.weights.announce(1)
    wait_until(lambda: scheduler.fleet().newest_weight_version == 1)


def test_a_phase_is_answered_when_every_instance_is_in_it(start: Start) -> None:
    scheduler = start(generator={"num_instances": 2})
    instances = [scheduler.instance(f"generator-{i}") for i in range(2)]
    with pytest.raises(grpc.RpcError) as caught:
        scheduler.set_phase(FLEET_PHASE_TRAIN, timeout_s=0.5)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    call = threading.Thread(target=scheduler.set_phase, args=(FLEET_PHASE_TRAIN,))
    call.start()
    for instance in instances:
        wait_until(lambda instance=instance: instance.heard and instance.heard[-1].phase == FLEET_PHASE_TRAIN)
        assert call.is_alive()
        instance.phase = FLEET_PHASE_TRAIN
    call.join()


def test_a_record_that_cannot_be_handled_goes_to_dead_letters(start: Start) -> None:
    scheduler = start()
    scheduler.write(b"\xff")
    scheduler.write(PromptRecord(attempt=1, batch_end=BatchEnd(purpose=PURPOSE_TRAIN, batch=0)))
    scheduler.write_batch(0, 1)
    letters = [DeadLetter.FromString(record.value) for record in scheduler.read(scheduler.topics.dead_letters, 0, 2)]
    assert [(letter.topic, letter.offset, letter.service) for letter in letters] == [
        (scheduler.topics.prompts, offset, "scheduler_svc") for offset in range(2)
    ]
    assert "no PromptRecord" in letters[0].reason
    assert letters[0].value == b"\xff"
    assert "num_groups is 0" in letters[1].reason
    scheduler.wait_for("batch 0 waits for version 0")
    assert scheduler.fleet().dead_letters == 2


def test_strangers_are_refused(start: Start) -> None:
    scheduler = start()
    scheduler.report(tokenizer_digest="right")

    def refusal(**fields: object) -> str:
        request = {"run_id": scheduler.run_id, "attempt": 1, "instance": "generator-0", "max_running": 1, **fields}
        with pytest.raises(grpc.RpcError) as caught:
            scheduler.stub.Register(RegisterRequest(**request), timeout=10)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        return str(caught.value.details())

    assert "tokenizer of digest wrong, the trainer one of right" in refusal(tokenizer_digest="wrong")
    assert "run 'other'" in refusal(run_id="other")
    assert "stale attempt" in refusal(attempt=0)
    with pytest.raises(grpc.RpcError):
        scheduler.stub.GetFleet(GetFleetRequest(run_id="other"), timeout=10)


def test_a_later_life_of_the_run_ends_this_scheduler(start: Start) -> None:
    scheduler = start()
    scheduler.write(PromptRecord(attempt=2, run_end=RunEnd()))
    code, error = scheduler.ended()
    assert (code, error["kind"]) == (1, "StaleAttemptError")
    assert "the run was resumed elsewhere" in error["message"]


def test_a_weights_svc_that_stays_away_ends_the_scheduler_with_its_address(start: Start) -> None:
    scheduler = start(rpc={"patience_s": 1.0})
    scheduler.weights.stop()
    code, error = scheduler.ended()
    assert (code, error["kind"]) == (1, "UnavailableError")
    assert scheduler.weights.address in error["message"]


def test_a_port_in_use_is_bad_input(start: Start, tmp_path: Path, kafka_settings: KafkaSection) -> None:
    address = start().address
    rpc = {"scheduler_address": address, "weights_address": free_address()}
    code, error = _run(tmp_path, {"kafka": kafka_settings.model_dump(), "rpc": rpc})
    assert (code, error["kind"]) == (2, "bad_input")
    assert f"cannot listen on {address}" in error["message"]


def _run(tmp_path: Path, settings: dict[str, object]) -> tuple[int, dict[str, str]]:
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"run": {"id": "run", "dir": str(tmp_path)}, **settings}))
    done = subprocess.run(
        [sys.executable, "-m", "scheduler_svc", str(file)], capture_output=True, text=True, timeout=60
    )
    return done.returncode, json.loads(done.stderr.splitlines()[-1])


def test_a_broker_that_does_not_answer_ends_it_with_the_reason(tmp_path: Path) -> None:
    rpc = {"deadline_s": 1, "weights_address": free_address()}
    code, error = _run(tmp_path, {"kafka": {"bootstrap_servers": free_address(), "patience_s": 1}, "rpc": rpc})
    assert (code, error["kind"]) == (1, "BrokerUnavailableError")
    assert "no Kafka broker answers" in error["message"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scheduler": {"dispatch": "fifo"}}, "scheduler.dispatch: dispatch policy 'fifo' is unknown: expected one of"),
        ({"scheduler": {"leases": 3}}, "scheduler.leases"),
        ({}, "rpc.weights_address is 127.0.0.1:0"),
        ({"rpc": {"weights_address": "127.0.0.1:1"}}, "kafka.bootstrap_servers is empty"),
    ],
)
def test_bad_settings_are_refused_by_name(tmp_path: Path, settings: dict[str, object], message: str) -> None:
    code, error = _run(tmp_path, settings)
    assert (code, error["kind"]) == (2, "bad_input")
    assert message in error["message"]


@pytest.mark.slow
def test_lengths_of_new_prompts_are_foretold_once_enough_were_answered(start: Start, tmp_path: Path) -> None:
    scheduler = start()
    instance = scheduler.instance("generator-0")
    scheduler.weights.announce(0)
    scheduler.report(complete=True)

    def answer_and_close(batch: int, num_groups: int) -> bool:
        """Of each batch ten prompts are new. Whether it is known by now how well they are foretold."""
        scheduler.write_batch(batch, num_groups)
        scheduler.weights.announce(batch)
        wait_until(lambda: {key.group for key in instance.samples() if key.batch == batch} == set(range(num_groups)))
        closed = [ClosedBatch(purpose=PURPOSE_TRAIN, batch=batch)]
        scheduler.report(_keys(batch, num_groups), closed=closed)
        return scheduler.fleet().HasField("length_recall")

    batches = itertools.count()
    wait_until(lambda: answer_and_close(batch := next(batches), 80 + 10 * batch), 200.0)
    assert scheduler.close() == 0
    assert list(tmp_path.glob("*/ranker/ranker.safetensors"))
