"""The loop: what it does while a plan is made, and that what is much comes through in parts."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from scheduler_svc import dispatcher
from scheduler_svc.ledger import Ledger
from scheduler_svc.picture import Picture
from scheduler_svc.schedule_loop import ScheduleLoop
from scheduler_svc.settings import SchedulerSection, SchedulerSettings
from streamrl.identity import PURPOSE_TRAIN, SampleKey
from streamrl.kafka.reader import Record
from streamrl.kafka.topics import Topics
from streamrl.planning.dispatch import Piece, plan
from streamrl.settings import PipelineSection, RunSection, SamplingView
from streamrl.v1.records_pb2 import Assignment, BatchEnd, Prompt, PromptRecord
from streamrl.v1.sample_pb2 import SamplingSettings
from streamrl.v1.scheduler_pb2 import (
    OUTCOME_ACCEPTED,
    DrainRequest,
    RegisterRequest,
    ReportBatchRequest,
    SampleOutcome,
)

NOW = 1e9
"""Later than the monotonic clock will be: leases do not end."""


class KeepingProducer:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.assignments: list[Assignment] = []

    def send(self, topic: str, value: bytes, *, partition: int) -> None:
        self.assignments.append(Assignment.FromString(value))

    def samples_at(self, incarnation: int) -> list[int]:
        """The groups of which an instance was given something; groups have one sample."""
        return sorted(one.group for one in self.assignments if one.incarnation == incarnation)


class Stage:
    """A loop with two instances and a batch of one-sample groups."""

    def __init__(self, num_groups: int, lease_s: float = 10.0, max_staleness: int = 1) -> None:
        settings = SchedulerSettings(
            run=RunSection(id="run"),
            pipeline=PipelineSection(mode="async" if max_staleness else "sync", max_staleness=max_staleness),
            generator=SamplingView(num_instances=2),
            scheduler=SchedulerSection(lease_s=lease_s),
        )
        self.ledger = Ledger(settings, incarnation=1, started_at=-1e9)
        self.producer = KeepingProducer()
        self.loop = ScheduleLoop(self.ledger, cast(Any, self.producer), Topics("run"))
        self.ledger.report(ReportBatchRequest(run_id="run", attempt=1, complete=True))
        self.ledger.announce(0, 1)
        self.incarnations = {name: self._register(name) for name in ("a", "b")}
        self.rounds = self.dispatches = 0
        self.news = asyncio.Event()
        self.keys = [SampleKey(PURPOSE_TRAIN, 0, group, 0) for group in range(num_groups)]

    def _register(self, name: str) -> int:
        request = RegisterRequest(run_id="run", attempt=1, instance=name, max_running=8)
        return self.ledger.register(request, NOW).incarnation

    def write_batch(self, batch: int = 0) -> None:
        end = BatchEnd(purpose=PURPOSE_TRAIN, batch=batch, num_groups=len(self.keys))
        prompts = [_prompt(key._replace(batch=batch)) for key in self.keys]
        records = [*prompts, PromptRecord(attempt=1, batch_end=end)]
        self.loop.take_records(
            [Record("prompts", 0, offset, None, one.SerializeToString()) for offset, one in enumerate(records)]
        )

    def accept(self, key: SampleKey) -> None:
        outcome = SampleOutcome(id=key.to_proto(), outcome=OUTCOME_ACCEPTED, num_tokens=1)
        self.ledger.report(ReportBatchRequest(run_id="run", attempt=1, outcomes=[outcome]))

    def drain(self, name: str) -> None:
        incarnation = self.incarnations[name]
        self.ledger.drain(DrainRequest(run_id="run", attempt=1, instance=name, incarnation=incarnation), NOW)

    async def until(self, happened: Callable[[], bool]) -> None:
        while not happened():
            self.news.clear()
            await self.news.wait()

    async def round(self) -> None:
        """A whole round of `run` from now on."""
        before = self.rounds
        self.loop.wake()
        await self.until(lambda: self.rounds > before)

    async def all_is_given_out(self) -> None:
        """Nothing is planned or waits any more."""
        before = self.dispatches
        self.loop.wake()
        await self.until(lambda: self.dispatches > before)

    def play(self, scene: Coroutine[Any, Any, None]) -> None:
        def tell_of_round() -> None:
            self.rounds += 1
            self.news.set()

        def tell_of_dispatch() -> None:
            self.dispatches += 1
            self.news.set()

        async def with_loop() -> None:
            tasks = [
                asyncio.create_task(self.loop.run(tell_of_round)),
                asyncio.create_task(self.loop.dispatch(tell_of_dispatch)),
            ]
            await asyncio.wait_for(scene, 30)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run(with_loop())


def _prompt(key: SampleKey) -> PromptRecord:
    prompt = Prompt(
        purpose=PURPOSE_TRAIN, batch=key.batch, group=key.group, num_samples=1, prompt_id=str(key.group), token_ids=[1],
        sampling=SamplingSettings(temperature=1.0, max_tokens=100),
    )  # fmt: skip
    return PromptRecord(attempt=1, prompt=prompt)


class HeldPlan:
    """Planning that takes as long as the test wants."""

    def __init__(self) -> None:
        self.begun, self._may_end = threading.Event(), threading.Event()

    def __call__(self, policy: str, pieces: list[Piece], *args: Any, **options: Any) -> dict[str, list[Piece]]:
        self.begun.set()
        assert self._may_end.wait(30)
        return plan(policy, pieces, *args, **options)

    @contextmanager
    def held(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._may_end.set()


@pytest.fixture
def held_plan(monkeypatch: pytest.MonkeyPatch) -> HeldPlan:
    held = HeldPlan()
    monkeypatch.setattr(dispatcher, "plan", held)
    return held


def test_rounds_go_on_while_a_plan_is_made_and_what_happened_meanwhile_counts(held_plan: HeldPlan) -> None:
    stage = Stage(num_groups=32)

    async def scene() -> None:
        stage.write_batch()
        with held_plan.held():
            await asyncio.to_thread(held_plan.begun.wait)
            stage.drain("a")
            stage.accept(stage.keys[3])
            await stage.round()
            assert not stage.producer.assignments
        await stage.all_is_given_out()

    stage.play(scene())
    assert stage.producer.samples_at(stage.incarnations["a"]) == []
    assert stage.producer.samples_at(stage.incarnations["b"]) == [group for group in range(32) if group != 3]


def test_nothing_of_a_batch_that_was_closed_while_it_was_planned_is_given_out(held_plan: HeldPlan) -> None:
    stage = Stage(num_groups=32)

    async def scene() -> None:
        stage.write_batch()
        with held_plan.held():
            await asyncio.to_thread(held_plan.begun.wait)
            stage.ledger.samples.close(stage.keys[0].batch_key)
        await stage.all_is_given_out()

    stage.play(scene())
    assert stage.producer.assignments == []


class CountedPlans:
    """How many pieces each plan had."""

    def __init__(self) -> None:
        self.num_pieces: list[int] = []

    def __call__(self, policy: str, pieces: list[Piece], *args: Any, **options: Any) -> dict[str, list[Piece]]:
        self.num_pieces.append(len(pieces))
        return plan(policy, pieces, *args, **options)


@pytest.mark.parametrize("event", ["nothing", "an answer", "a lost instance"])
def test_a_batch_is_planned_while_its_version_is_awaited_and_anew_when_the_fleet_changes(
    event: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(num_groups=32, max_staleness=0)
    counted = CountedPlans()
    monkeypatch.setattr(dispatcher, "plan", counted)

    async def scene() -> None:
        stage.write_batch(0)
        await stage.all_is_given_out()
        for key in stage.keys[1:]:
            stage.accept(key)
        # One answer to the batch before is still on its way: it is over when the next version is there.
        stage.write_batch(1)
        await stage.all_is_given_out()
        assert counted.num_pieces == [32, 32]
        assert len(stage.producer.assignments) == 32
        if event == "an answer":
            stage.accept(stage.keys[3]._replace(batch=1))
        if event == "a lost instance":
            stage.drain("a")
        stage.ledger.announce(1, 1)
        await stage.all_is_given_out()

    stage.play(scene())
    assert counted.num_pieces == ([32, 32, 32] if event == "a lost instance" else [32, 32])
    given = [one for one in stage.producer.assignments if one.batch == 1]
    assert sorted(one.group for one in given) == [g for g in range(32) if event != "an answer" or g != 3]
    owners = {one.incarnation for one in given}
    assert owners == ({stage.incarnations["b"]} if event == "a lost instance" else {*stage.incarnations.values()})


def test_a_batch_is_looked_at_at_once_however_seldom_an_idle_fleet_is(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(num_groups=32, lease_s=1000.0)
    looks: list[Picture | None] = []
    take = stage.ledger.picture

    def picture(now: float) -> Picture | None:
        looks.append(take(now))
        stage.news.set()
        return looks[-1]

    monkeypatch.setattr(stage.ledger, "picture", picture)

    async def scene() -> None:
        watching = asyncio.create_task(stage.loop.watch_progress())
        await stage.round()
        await stage.until(lambda: None in looks)
        stage.write_batch()
        await stage.all_is_given_out()
        # As by the first heartbeat.
        await stage.round()
        await stage.until(lambda: looks[-1] is not None)
        watching.cancel()

    stage.play(scene())


def test_a_batch_of_many_prompts_comes_through_whole() -> None:
    stage = Stage(num_groups=1203)

    async def scene() -> None:
        stage.write_batch()
        await stage.until(lambda: len(stage.producer.assignments) == 1203)

    stage.play(scene())
    shares = [stage.producer.samples_at(incarnation) for incarnation in stage.incarnations.values()]
    assert sorted(shares[0] + shares[1]) == list(range(1203))
    assert all(shares)
