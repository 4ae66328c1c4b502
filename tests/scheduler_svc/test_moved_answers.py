"""Answers that have begun go from instance to instance, and instances die, at any moment: each comes out once, whole.

Real parts: the scheduler's ledger, the instances' generate loops on fake engines, the trainer's acceptance. Between
them are lists whose records are late, and a clock that jumps from one thing that happens to the next. Token number i of
an answer is i, and its log-prob says which version the engine had, so that whatever is lost, doubled or misnamed on a
move shows.
"""

import asyncio
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from generator_svc.activity import ActivityLog
from generator_svc.engine import GenerationRequest, GenerationResult, SwitchReport
from generator_svc.fake_engine import FakeEngine, log_normal_length
from generator_svc.generate_loop import GenerateLoop
from generator_svc.membership import Membership
from generator_svc.sample import samples_of
from generator_svc.version_gate import Swap, Target
from scheduler_svc.ledger import Ledger
from scheduler_svc.picture import Wish
from scheduler_svc.settings import SchedulerSection, SchedulerSettings
from streamrl.identity import PURPOSE_TRAIN, BatchKey, SampleKey
from streamrl.settings import PipelineSection, RunSection, SamplingView, WeightsSection
from streamrl.v1.records_pb2 import Assignment, BatchEnd, Prompt, PromptRecord, Rollout, SampleDraw
from streamrl.v1.sample_pb2 import SamplingSettings
from streamrl.v1.scheduler_pb2 import (
    ClosedBatch,
    HeartbeatResponse,
    RegisterRequest,
    ReportBatchRequest,
    SampleOutcome,
)
from streamrl.v1.weights_pb2 import VersionManifest
from tests.jumping_loop import run
from tests.scheduler_svc.dispatching import decide
from trainer_svc.acceptance import Acceptance
from trainer_svc.groups import AcceptanceRules

LEASE_S = 4.0
MAX_TOKENS = 200
NUM_BATCHES, NUM_GROUPS, NUM_SAMPLES = 3, 4, 3
STOP = MAX_TOKENS + 1
PROMPT = [7, 8]


class CountingEngine(FakeEngine):
    """Tokens are numbered, and their log-probs are -1 - the version."""

    def __init__(self, version: int) -> None:
        super().__init__(
            cast(Any, SimpleNamespace()), max_running=4, step_ms={1: 10.0, 4: 20.0}, answer_length=log_normal_length
        )
        self._alive, self._weight_version = True, version
        self._instance.stand_until(asyncio.get_running_loop().time())

    async def switch(self, manifest: VersionManifest) -> SwitchReport:
        fetched = SimpleNamespace(manifest=manifest, fetch_s=0.0, close=lambda: None)
        return await self._load(cast(Any, fetched))

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        result = await super().generate(request)
        there = len(request.prefix_token_ids)
        assert request.prefix_token_ids == list(range(there))
        token_ids = list(range(there, there + len(result.token_ids)))
        if result.finish_reason == "stop":
            token_ids[-1] = STOP
        logprobs = [-1.0 - version for version, count in result.version_spans for _ in range(count)]
        return GenerationResult(token_ids, logprobs, result.version_spans, result.finish_reason, result.started_s)


class Weights:
    """What a WeightSwitch is to a generate loop."""

    def __init__(self, engine: CountingEngine, version: int) -> None:
        self._engine = engine
        self.loaded = version

    def prefetch(self, weight_version: int) -> None:
        pass

    async def switch(self, target: Target) -> SwitchReport:
        report = await self._engine.switch(VersionManifest(weight_version=target.weight_version))
        self.loaded = target.weight_version
        return report


@dataclass
class Outbox:
    """Rollouts of one instance; those that are not delivered yet die with it."""

    instance: str
    incarnation: int = 0
    dead_letters: int = 0
    records: list[Rollout] = field(default_factory=list)

    def begin(self, incarnation: int) -> None:
        self.incarnation = incarnation

    def send(self, rollout: Rollout) -> None:
        rollout.attempt, rollout.instance, rollout.incarnation = 1, self.instance, self.incarnation
        self.records.append(rollout)


class Instance:
    """A process: an engine and all that is around it but its connections."""

    def __init__(self, name: str, version: int, swap: Swap) -> None:
        self.name = name
        self.engine = CountingEngine(version)
        self.weights = Weights(self.engine, version)
        self.outbox = Outbox(name)
        self.heard_at = 0.0
        self.to_read: list[Assignment] = []
        activity = ActivityLog(cast(Any, SimpleNamespace(write=lambda *_, **__: None)))
        self.loop = GenerateLoop(
            self.engine,
            cast(Any, self.weights),
            cast(Any, self.outbox),
            activity,
            swap=swap,
            lease_holds=lambda: asyncio.get_running_loop().time() - self.heard_at <= LEASE_S,
            say_now=lambda: None,
        )
        self.membership = Membership(
            cast(Any, SimpleNamespace(heartbeat=SimpleNamespace(event_loop_lag_s=0.0))),
            RegisterRequest(run_id="run", attempt=1, instance=name, max_running=4),
            engine=self.engine,
            weights=cast(Any, self.weights),
            loop=self.loop,
            reader=cast(Any, None),
            outbox=cast(Any, self.outbox),
            activity=activity,
        )
        self.working = asyncio.create_task(self.loop.run())

    def begin(self, incarnation: int, now: float) -> None:
        self.heard_at = now
        self.membership.incarnation = incarnation
        self.loop.begin(incarnation)

    async def end(self) -> None:
        await self.engine.stop()
        self.working.cancel()
        await asyncio.gather(self.working, return_exceptions=True)


class World:
    """All processes, and what may happen to them."""

    def __init__(self, seed: int, swap: Swap) -> None:
        self.chance = random.Random(seed)
        self.swap: Swap = swap
        settings = SchedulerSettings(
            run=RunSection(id="run", seed=seed),
            pipeline=PipelineSection(mode="async", max_staleness=1),
            generator=SamplingView(num_instances=2),
            weights=WeightsSection(swap=swap),
            # Kills count, and there may be many of them.
            scheduler=SchedulerSection(lease_s=LEASE_S, max_dispatches=1000),
        )
        self.ledger = Ledger(settings, incarnation=1, started_at=-LEASE_S)
        self.acceptance = Acceptance(AcceptanceRules(attempt=1, max_staleness=1))
        self.instances: dict[str, Instance] = {}
        self.by_incarnation: dict[int, Instance] = {}
        self.delivered: list[Rollout] = []
        self.taken: list[Rollout] = []
        self.outcomes: list[SampleOutcome] = []
        self.closed = 0
        self.kills = 0
        self.ledger.report(ReportBatchRequest(run_id="run", attempt=1, complete=True))
        self.ledger.announce(0, 1)
        for batch in range(NUM_BATCHES):
            self._write(batch)
        for name in ("a", "b", "c"):
            self._start(name)

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def _write(self, batch: int) -> None:
        prompts = [SimpleNamespace(token_ids=PROMPT)] * NUM_GROUPS
        self.acceptance.open(BatchKey(PURPOSE_TRAIN, batch), prompts, NUM_SAMPLES)
        sampling = SamplingSettings(temperature=1.0, max_tokens=MAX_TOKENS, stop_token_ids=[STOP])
        for group in range(NUM_GROUPS):
            prompt = Prompt(
                purpose=PURPOSE_TRAIN, batch=batch, group=group, num_samples=NUM_SAMPLES, prompt_id=f"p{group}",
                token_ids=PROMPT, sampling=sampling,
            )  # fmt: skip
            self.ledger.take_record(PromptRecord(attempt=1, prompt=prompt))
        end = BatchEnd(purpose=PURPOSE_TRAIN, batch=batch, num_groups=NUM_GROUPS)
        self.ledger.take_record(PromptRecord(attempt=1, batch_end=end))

    def _start(self, name: str) -> None:
        instance = self.instances[name] = Instance(name, self.closed, self.swap)
        place = self.ledger.register(RegisterRequest(run_id="run", attempt=1, instance=name, max_running=4), self.now)
        self.by_incarnation[place.incarnation] = instance
        instance.begin(place.incarnation, self.now)

    async def kill(self, name: str) -> None:
        """At any moment, and another process takes its place at once."""
        self.kills += 1
        await self.instances[name].end()
        self._start(name)

    def beat(self, instance: Instance, *, loses: str) -> None:
        """A heartbeat and its answer; either may be lost, with the stream."""
        request = instance.membership.report()
        if loses != "request":
            self.ledger.heartbeat(request, self.now)
            answer = self.ledger.answer(instance.name, request.incarnation)
            if loses != "answer":
                self._hear(instance, answer)
                return
        instance.membership.not_heard()

    def _hear(self, instance: Instance, answer: HeartbeatResponse) -> None:
        assert answer.lease_granted
        instance.heard_at = self.now
        instance.membership.heard(answer)

    def move(self) -> None:
        """Anything goes anywhere."""
        lives = [life for life in self.ledger.registry.lives() if life.samples]
        if lives:
            source = self.chance.choice(lives)
            key = self.chance.choice(sorted(source.samples))
            target = self.chance.choice([life for life in self.ledger.registry.lives() if life is not source])
            wish = Wish(key, source.samples[key].dispatch, source, target, begun=True)
            self.ledger.ask_for_moves([wish], self.now)

    def advance(self) -> None:
        for outgoing in decide(self.ledger, self.now):
            self.by_incarnation[outgoing.assignment.incarnation].to_read.append(outgoing.assignment)

    def read(self, instance: Instance) -> None:
        records, instance.to_read = instance.to_read, []
        for assignment in records:
            if assignment.incarnation == instance.membership.incarnation:
                instance.loop.take(samples_of(assignment, self.now))

    def deliver(self, instance: Instance) -> None:
        self.delivered += instance.outbox.records
        instance.outbox.records = []

    def train(self) -> None:
        """Takes some rollouts in any order, some twice; reports; closes what is complete; publishes."""
        self.chance.shuffle(self.delivered)
        for rollout in self.delivered[: self.chance.randrange(6)]:
            self.delivered.remove(rollout)
            self._offer(rollout)
            if self.chance.random() < 0.2:
                self._offer(rollout)
        closed = []
        key = BatchKey(PURPOSE_TRAIN, self.closed)
        if self.closed < NUM_BATCHES and self.acceptance.batch(key).complete:
            self.acceptance.close(key)
            self.closed += 1
            closed.append(ClosedBatch(purpose=PURPOSE_TRAIN, batch=key.batch))
            self.ledger.announce(self.closed, 1)
        outcomes, self.outcomes = self.outcomes, []
        self.ledger.report(ReportBatchRequest(run_id="run", attempt=1, outcomes=outcomes, closed=closed))

    def _offer(self, rollout: Rollout) -> None:
        verdict = self.acceptance.offer(rollout)
        assert not verdict.dead_letter
        assert verdict.outcome is None
        if verdict.unscored is not None:
            self.taken.append(rollout)
            self.outcomes.append(self.acceptance.scored(verdict.unscored.key, self.chance.random()))

    async def go_on(self, seconds: float) -> None:
        """Time passes; who works well goes on."""
        until = self.now + seconds
        while self.now < until:
            await asyncio.sleep(min(0.3, until - self.now) + 1e-6)
            for instance in self.instances.values():
                self.beat(instance, loses="")
                self.read(instance)
                self.deliver(instance)
            self.advance()
            self.train()
            self.check()

    def check(self) -> None:
        for instance in self.instances.values():
            assert not instance.working.done(), instance.working.exception()

    async def do_something(self) -> None:
        instance = self.chance.choice(list(self.instances.values()))
        what = self.chance.choices(
            ["move", "beat", "read", "deliver", "advance", "train", "pass", "kill", "lose"],
            [14, 12, 8, 4, 8, 2, 14, 1, 2],
        )[0]
        if what == "move":
            self.move()
        elif what == "beat":
            self.beat(instance, loses="")
        elif what == "lose":
            self.beat(instance, loses=self.chance.choice(["request", "answer"]))
        elif what == "read":
            self.read(instance)
        elif what == "deliver":
            self.deliver(instance)
        elif what == "advance":
            self.advance()
        elif what == "train":
            self.train()
        elif what == "kill":
            await self.kill(instance.name)
        else:
            await asyncio.sleep(self.chance.choice([0.0, 0.005, 0.02, 0.1, 0.4]))
        for other in self.instances.values():
            if self.now - other.heard_at > LEASE_S / 2:
                self.beat(other, loses="")
        self.check()

    async def end(self) -> None:
        for instance in self.instances.values():
            await instance.end()


def check_rollout(rollout: Rollout) -> None:
    """Nothing is missing, nothing is there twice, and every token is of the version that it says."""
    token_ids = list(rollout.token_ids)
    assert token_ids[:-1] == list(range(len(token_ids) - 1))
    assert token_ids[-1] in (STOP, len(token_ids) - 1)
    assert len(token_ids) <= MAX_TOKENS
    versions = [span.weight_version for span in rollout.version_spans for _ in range(span.num_tokens)]
    assert list(rollout.logprobs) == [-1.0 - version for version in versions]
    assert versions == sorted(versions)
    assert rollout.id.batch - 1 <= versions[0]
    assert versions[-1] <= rollout.id.batch


@pytest.mark.parametrize("swap", ["boundary", "in_flight"])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
def test_every_answer_comes_out_once_and_whole(seed: int, swap: Swap) -> None:
    async def scenario() -> None:
        world = World(seed, swap)
        for _ in range(600):
            await world.do_something()
        moved = world.ledger.samples.moved
        for _ in range(100):
            if world.closed == NUM_BATCHES:
                break
            await world.go_on(4.0)
        await world.end()
        assert world.closed == NUM_BATCHES
        counts = world.acceptance.counts
        assert counts.balanced
        assert counts.expected == counts.trained == counts.received == NUM_BATCHES * NUM_GROUPS * NUM_SAMPLES
        assert moved > 0
        for rollout in world.taken:
            check_rollout(rollout)
        keys = sorted(SampleKey.from_proto(rollout.id) for rollout in world.taken)
        assert keys == [
            SampleKey(PURPOSE_TRAIN, batch, group, sample)
            for batch in range(NUM_BATCHES)
            for group in range(NUM_GROUPS)
            for sample in range(NUM_SAMPLES)
        ]

    run(scenario())


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
def test_without_kills_nothing_is_generated_twice(seed: int) -> None:
    """However often answers move, and whatever is lost of what is said about it."""

    async def scenario() -> None:
        world = World(seed, "boundary")
        for _ in range(300):
            world.move()
            instance = world.chance.choice(list(world.instances.values()))
            world.beat(instance, loses=world.chance.choice(["", "", "", "request", "answer"]))
            await world.go_on(0.1)
        for _ in range(100):
            if world.closed == NUM_BATCHES:
                break
            await world.go_on(4.0)
        drawn = sum(instance.loop.generated_tokens for instance in world.instances.values())
        await world.end()
        assert world.closed == NUM_BATCHES
        assert world.acceptance.counts.duplicate <= world.acceptance.counts.expected
        assert drawn == sum(len(rollout.token_ids) for rollout in world.taken)
        assert world.ledger.samples.moved > 20

    run(scenario())


def test_an_answer_ends_though_the_rest_of_its_last_step_does_not_move_the_clock() -> None:
    async def scenario() -> None:
        await asyncio.sleep(1000.0)
        engine = CountingEngine(0)
        request = GenerationRequest(
            request_id="a",
            prompt_token_ids=PROMPT,
            temperature=1.0,
            max_tokens=5,
            stop_token_ids=[],
            seed=1,
            priority=0,
        )
        answer = asyncio.create_task(engine.generate(request))
        await asyncio.sleep(0.01)
        engine.progress()
        engine._instance._steps = 5 - 1e-14
        engine._go_on()
        for _ in range(10):
            await asyncio.sleep(0)
        ended = answer.done()
        await engine.stop()
        assert ended

    run(scenario())


def test_what_was_said_or_has_not_come_is_not_said_at_once_when_it_is_asked_for_again() -> None:
    """Else an instance and the scheduler, which asks in each answer, would talk without a pause."""

    async def scenario() -> None:
        instance, key = Instance("a", 0, "boundary"), SampleKey(PURPOSE_TRAIN, 0, 0, 0)
        spoken: list[SampleKey] = []
        instance.loop._say_now = lambda: spoken.append(key)
        instance.begin(1, 0.0)
        instance.loop.revoke_unstarted([key])
        instance.loop.revoke([key])
        assert not spoken
        sampling = SamplingSettings(temperature=1.0, max_tokens=MAX_TOKENS)
        draws = [SampleDraw(sample=0, dispatch=1)]
        assignment = Assignment(purpose=PURPOSE_TRAIN, token_ids=PROMPT, sampling=sampling, draws=draws)
        instance.loop.take(samples_of(assignment, 0.0))
        assert len(spoken) == 1
        instance.loop.revoke_unstarted([key])
        assert len(spoken) == 1
        assert [given_back.dispatch for given_back in instance.membership.report().revoked] == [1]
        await instance.end()

    run(scenario())
