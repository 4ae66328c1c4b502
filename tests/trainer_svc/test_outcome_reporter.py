import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from streamrl.errors import StreamRLError, UnavailableError
from streamrl.identity import PURPOSE_TRAIN, BatchKey, SampleKey
from streamrl.rpc.server import Server
from streamrl.v1.scheduler_pb2 import (
    FLEET_PHASE_TRAIN,
    FLEET_PHASE_UNSPECIFIED,
    OUTCOME_ACCEPTED,
    AbandonedSample,
    ReportBatchRequest,
    ReportBatchResponse,
    SampleOutcome,
    TrainerPace,
)
from streamrl.v1.scheduler_pb2_grpc import SchedulerServiceServicer, add_SchedulerServiceServicer_to_server
from trainer_svc.outcome_reporter import OutcomeReporter

WAIT_S = 20.0


class ScriptedScheduler(SchedulerServiceServicer):
    """Notes what it is told; a test says in which life it is and what it has given up."""

    def __init__(self) -> None:
        self.requests: list[ReportBatchRequest] = []
        self.incarnation = 1
        self.redispatched = 0
        self.abandoned: list[AbandonedSample] = []
        self.refusals = 0
        self.told = threading.Condition()

    async def ReportBatch(self, request: ReportBatchRequest, context: Any) -> ReportBatchResponse:
        with self.told:
            if self.refusals:
                self.refusals -= 1
                raise UnavailableError("not yet")
            self.requests.append(request)
            self.told.notify_all()
            return ReportBatchResponse(
                scheduler_incarnation=self.incarnation, abandoned=self.abandoned, redispatched=self.redispatched
            )

    def wait(self, condition: Callable[[], bool]) -> None:
        with self.told:
            assert self.told.wait_for(condition, WAIT_S), self.requests

    def told_samples(self, *, complete: bool) -> list[int]:
        return [
            outcome.id.sample
            for request in self.requests
            if request.complete == complete
            for outcome in request.outcomes
        ]


@pytest.fixture
def scheduler() -> Iterator[tuple[ScriptedScheduler, str]]:
    servicer = ScriptedScheduler()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    servers: list[Server] = []

    async def start() -> str:
        servers.append(
            Server(
                "streamrl.v1.SchedulerService",
                lambda server: add_SchedulerServiceServicer_to_server(servicer, server),
            )
        )
        return await servers[0].serve("127.0.0.1:0")

    address = asyncio.run_coroutine_threadsafe(start(), loop).result(WAIT_S)
    yield servicer, address
    asyncio.run_coroutine_threadsafe(servers[0].stop(), loop).result(WAIT_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(WAIT_S)
    loop.close()


def accepted(sample: int) -> SampleOutcome:
    return SampleOutcome(id=SampleKey(PURPOSE_TRAIN, 0, 0, sample).to_proto(), outcome=OUTCOME_ACCEPTED)


class Trainer:
    """What the reporter speaks to on the trainer's side."""

    def __init__(self) -> None:
        self.known: list[SampleOutcome] = []
        self.closed: list[BatchKey] = []
        self.abandoned: list[AbandonedSample] = []
        self.errors: list[BaseException] = []
        self.changed = threading.Event()

    def reporter(self, address: str, patience_s: float = WAIT_S) -> OutcomeReporter:
        def on_abandoned(samples: Any) -> None:
            self.abandoned.extend(samples)
            self.changed.set()

        def on_error(error: BaseException) -> None:
            self.errors.append(error)
            self.changed.set()

        return OutcomeReporter(
            address,
            run_id="r",
            attempt=2,
            tokenizer_digest="abc",
            deadline_s=5.0,
            patience_s=patience_s,
            known_outcomes=lambda: (self.known, self.closed),
            on_abandoned=on_abandoned,
            on_error=on_error,
            phase=lambda: FLEET_PHASE_TRAIN,
            redispatched=10,
        )


def test_the_first_report_tells_everything_and_later_ones_what_is_new(scheduler: tuple[ScriptedScheduler, str]) -> None:
    servicer, address = scheduler
    trainer = Trainer()
    trainer.known, trainer.closed = [accepted(0)], [BatchKey(PURPOSE_TRAIN, 7)]
    reporter = trainer.reporter(address).start()
    servicer.wait(lambda: servicer.told_samples(complete=True) == [0])
    reporter.report(accepted(1))
    reporter.report(accepted(2))
    reporter.set_pace(TrainerPace(token_s=0.25, pass_tokens=64))
    reporter.close_batch(BatchKey(PURPOSE_TRAIN, 8))
    servicer.wait(lambda: servicer.told_samples(complete=False) == [1, 2])
    reporter.close()
    assert servicer.requests[-1].trainer_pace == TrainerPace(token_s=0.25, pass_tokens=64)
    assert not servicer.requests[0].HasField("trainer_pace")
    first, closed = servicer.requests[0], [one.batch for request in servicer.requests for one in request.closed]
    assert (first.run_id, first.attempt, first.tokenizer_digest) == ("r", 2, "abc")
    assert first.phase == FLEET_PHASE_TRAIN
    # A scheduler that knows it may have been told another one meanwhile.
    assert {request.phase for request in servicer.requests if not request.complete} == {FLEET_PHASE_UNSPECIFIED}
    assert closed == [7, 8]
    assert trainer.errors == []


def test_a_scheduler_in_a_new_life_is_told_everything_again(scheduler: tuple[ScriptedScheduler, str]) -> None:
    servicer, address = scheduler
    trainer = Trainer()
    servicer.redispatched = 3
    reporter = trainer.reporter(address).start()
    servicer.wait(lambda: len(servicer.requests) >= 1)
    trainer.known = [accepted(5)]
    with servicer.told:
        servicer.incarnation, servicer.redispatched = 2, 4
    servicer.wait(lambda: servicer.told_samples(complete=True) == [5])
    reporter.close()
    # 10 before this process, 3 in the scheduler's first life, 4 in its second.
    assert reporter.redispatched == 17


def test_given_up_samples_are_learnt_without_anything_to_report(scheduler: tuple[ScriptedScheduler, str]) -> None:
    servicer, address = scheduler
    trainer = Trainer()
    reporter = trainer.reporter(address).start()
    servicer.wait(lambda: len(servicer.requests) >= 1)
    with servicer.told:
        servicer.abandoned = [AbandonedSample(id=accepted(3).id, reason="dispatched 3 times")]
    assert trainer.changed.wait(WAIT_S)
    reporter.close()
    assert trainer.abandoned[0].id.sample == 3


def test_outcomes_that_could_not_be_reported_are_reported_again(scheduler: tuple[ScriptedScheduler, str]) -> None:
    servicer, address = scheduler
    servicer.refusals = 2
    trainer = Trainer()
    reporter = trainer.reporter(address)
    reporter.report(accepted(1))
    reporter.start()
    servicer.wait(lambda: servicer.told_samples(complete=True) == [1])
    reporter.close()
    assert trainer.errors == []


def test_a_scheduler_that_never_answers_ends_the_wait() -> None:
    trainer = Trainer()
    reporter = trainer.reporter("127.0.0.1:9", patience_s=0.1).start()
    assert trainer.changed.wait(WAIT_S)
    reporter.close()
    assert isinstance(trainer.errors[0], StreamRLError)
