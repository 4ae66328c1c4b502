"""What the ledger gives whatever happens: a model of a fleet and a trainer that lose, delay and repeat what they say.

The model's instances keep their side of the lease: each counts from the last answer that it heard, and stops by itself.
Answers may be late by nearly a lease, requests and answers may be lost, processes die, drain, come back, and the
scheduler itself may be restarted. Plans are carried out in parts, and late: anything may happen meanwhile.
At the end of each run the model plays on without faults, and everything must come to its end.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from scheduler_svc.batches import SampleState
from scheduler_svc.dispatcher import Draft, Placing
from scheduler_svc.ledger import Ledger
from scheduler_svc.picture import Wish
from scheduler_svc.settings import SchedulerSection, SchedulerSettings
from streamrl.batch_progress import progress_proto
from streamrl.identity import PURPOSE_EVALUATION, PURPOSE_TRAIN, BatchKey, SampleKey
from streamrl.settings import PipelineSection, RunSection, SamplingView
from streamrl.staleness import required_version
from streamrl.v1.records_pb2 import Assignment, BatchEnd, Prompt, PromptRecord, SampleDraw
from streamrl.v1.sample_pb2 import AnswerPrefix, SamplingSettings, VersionSpan
from streamrl.v1.scheduler_pb2 import (
    OUTCOME_ACCEPTED,
    OUTCOME_DROPPED,
    OUTCOME_REJECTED,
    ClosedBatch,
    DrainRequest,
    GivenBack,
    HeartbeatRequest,
    HeartbeatResponse,
    RegisterRequest,
    ReportBatchRequest,
    SampleOutcome,
)

LEASE_S = 8
MAX_RUNNING = 4
MAX_STALENESS = 1
NAMES = ["a", "b", "c"]
LINKS = ["well", "well", "well", "late", "last words", "deaf", "mute"]
"""How a connection is: well; answers come late; one late answer and then nothing; answers are lost; requests are lost
too."""


@dataclass
class Instance:
    """A generator as it should be."""

    name: str
    incarnation: int = 0
    partition: int = 0
    link: str = "well"
    registered: bool = False
    draining: bool = False
    heard_at: float = 0.0
    read: int = 0
    """Records of its partition that it has read."""
    waiting: dict[SampleKey, SampleDraw] = field(default_factory=dict)
    running: dict[SampleKey, SampleDraw] = field(default_factory=dict)
    given_back: list[GivenBack] = field(default_factory=list)
    not_revoked: list[SampleKey] = field(default_factory=list)
    answers: list[tuple[float, HeartbeatResponse]] = field(default_factory=list)
    """On their way, with the time at which they arrive."""

    def lose_everything(self) -> None:
        self.registered = self.draining = False
        for kept in (self.waiting, self.running, self.given_back, self.not_revoked, self.answers):
            kept.clear()


@dataclass(frozen=True)
class Rollout:
    key: SampleKey
    instance: str
    incarnation: int
    dispatch: int
    usable: bool


def _samples(assignment: Assignment) -> list[SampleKey]:
    return [SampleKey(assignment.purpose, assignment.batch, assignment.group, draw.sample) for draw in assignment.draws]


def _tokens_there(draw: SampleDraw) -> int:
    return len(draw.prefix.token_ids)


def _longer(draw: SampleDraw) -> AnswerPrefix:
    """With one more token."""
    count = _tokens_there(draw) + 1
    spans = [VersionSpan(weight_version=0, num_tokens=count)]
    return AnswerPrefix(token_ids=range(count), logprobs=[0.0] * count, version_spans=spans)


class Fleet:
    """The world around a ledger. Its methods are what may happen."""

    def __init__(self, policy: str, chance: random.Random) -> None:
        self.settings = SchedulerSettings(
            run=RunSection(id="run"),
            pipeline=PipelineSection(mode="async", max_staleness=MAX_STALENESS),
            generator=SamplingView(num_instances=2),
            scheduler=SchedulerSection(
                lease_s=LEASE_S, fleet_wait_s=20, max_dispatches=2, max_instances=3, dispatch=policy
            ),
        )
        self.chance = chance
        self.now = 0.0
        self.lives = 1
        self.ledger = Ledger(self.settings, incarnation=1000, started_at=0.0)
        self.log: list[PromptRecord] = []
        self.partitions: list[list[Assignment]] = [[], [], []]
        self.instances = {name: Instance(name) for name in NAMES}
        self.on_their_way: list[Rollout] = []
        self.draft: Draft | None = None
        self.planned: list[Placing] = []
        """What of the draft is not carried out yet."""
        self.late_dispatches = True
        # The trainer.
        self.version = -1
        self.next_batch = 0
        self.wanted: dict[BatchKey, set[SampleKey]] = {}
        self.resolved: dict[SampleKey, SampleOutcome] = {}
        self.abandoned: set[SampleKey] = set()
        self.closed: list[BatchKey] = []
        self.to_report: list[SampleOutcome] = []
        self.to_close: list[BatchKey] = []
        self.reported_before: list[SampleOutcome] = []
        self.told: set[SampleKey] = set()
        """Samples that some life of the scheduler knew to be over."""
        self.scheduler_incarnation: int | None = None

    # The trainer writes, publishes, takes, reports.

    @property
    def trained(self) -> int:
        return sum(key.purpose == PURPOSE_TRAIN for key in self.closed)

    def write_batch(self, num_groups: int, num_samples: int) -> None:
        if self.next_batch <= self.trained + MAX_STALENESS:
            self._write(BatchKey(PURPOSE_TRAIN, self.next_batch), num_groups, num_samples)
            self.next_batch += 1

    def write_evaluation(self, num_groups: int) -> None:
        key = BatchKey(PURPOSE_EVALUATION, self.trained)
        if key not in self.wanted and key not in self.closed:
            self._write(key, num_groups, 1)

    def _write(self, key: BatchKey, num_groups: int, num_samples: int) -> None:
        sampling = SamplingSettings(temperature=1.0, max_tokens=50)
        for group in range(num_groups):
            prompt = Prompt(
                purpose=key.purpose,  # type: ignore[arg-type]
                batch=key.batch,
                group=group,
                prompt_id=f"p{group}",
                token_ids=[group],
                sampling=sampling,
                num_samples=num_samples,
            )
            self._record(PromptRecord(attempt=1, prompt=prompt))
        end = BatchEnd(purpose=key.purpose, batch=key.batch, num_groups=num_groups)  # type: ignore[arg-type]
        self._record(PromptRecord(attempt=1, batch_end=end))
        self.wanted[key] = {SampleKey(*key, group, s) for group in range(num_groups) for s in range(num_samples)}
        self._advance()

    def _record(self, record: PromptRecord) -> None:
        self.log.append(record)
        self.ledger.take_record(record)

    def publish(self) -> None:
        if self.version < self.trained:
            self.version += 1
            self.ledger.announce(self.version, 1)
            self._advance()

    def receive(self, index: int, *, again: bool) -> None:
        """Rollouts come in any order, and some twice."""
        if self.on_their_way:
            rollout = self.on_their_way[index % len(self.on_their_way)]
            if not again:
                self.on_their_way.remove(rollout)
            self._take(rollout)

    def _take(self, rollout: Rollout) -> None:
        key = rollout.key
        if key.batch_key not in self.wanted or key in self.resolved:
            return
        outcome = SampleOutcome(
            id=key.to_proto(), outcome=OUTCOME_ACCEPTED, num_tokens=1 + 7 * key.group, dispatch=rollout.dispatch
        )
        if rollout.usable:
            self.resolved[key] = outcome
        else:
            outcome.outcome = OUTCOME_REJECTED
            outcome.incarnation = rollout.incarnation
        self.to_report.append(outcome)
        self._close_whole_batches()

    def _close_whole_batches(self) -> None:
        for key in list(self.wanted):
            in_turn = key.purpose == PURPOSE_EVALUATION or key.batch == self.trained
            if in_turn and self.wanted[key] <= self.resolved.keys():
                del self.wanted[key]
                self.closed.append(key)
                self.to_close.append(key)

    def report(self, *, again: bool) -> None:
        """Says what became of samples, perhaps with everything that was said before."""
        outcomes, closed = self.to_report, self.to_close
        complete = self.scheduler_incarnation is None
        if complete:
            outcomes = [
                *(self.resolved[key] for keys in self.wanted.values() for key in sorted(keys) if key in self.resolved),
                *outcomes,
            ]
            closed = self.closed
        if again:
            outcomes = [*outcomes, *self.reported_before]
        self.reported_before += self.to_report
        self.to_report, self.to_close = [], []
        response = self.ledger.report(
            ReportBatchRequest(
                run_id="run",
                attempt=1,
                outcomes=outcomes,
                closed=[ClosedBatch(purpose=key.purpose, batch=key.batch) for key in closed],  # type: ignore[arg-type]
                complete=complete,
            )
        )
        self.told.update(key for outcome in outcomes if (key := SampleKey.from_proto(outcome.id)) in self.resolved)
        known, new = self.scheduler_incarnation, response.scheduler_incarnation
        self.scheduler_incarnation = new if known in (None, new) else None
        for given_up in response.abandoned:
            key = SampleKey.from_proto(given_up.id)
            if key.batch_key in self.wanted and key not in self.resolved:
                self.abandoned.add(key)
                self.resolved[key] = SampleOutcome(id=given_up.id, outcome=OUTCOME_DROPPED)
                self.to_report.append(self.resolved[key])
        self._close_whole_batches()
        self._advance()

    # Instances.

    def register(self, name: str) -> None:
        instance = self.instances[name]
        if instance.registered:
            return
        instance.lose_everything()
        request = RegisterRequest(run_id="run", attempt=1, instance=name, max_running=MAX_RUNNING)
        response = self.ledger.register(request, self.now)
        assert response.incarnation > instance.incarnation
        instance.incarnation, instance.partition = response.incarnation, response.partition
        instance.registered, instance.heard_at, instance.read = True, self.now, 0
        self._advance()

    def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1
            for instance in self.instances.values():
                self._hear(instance)
                if instance.registered and self.now - instance.heard_at >= LEASE_S:
                    instance.lose_everything()
                if instance.registered and instance.link != "mute":
                    self._heartbeat(instance)
            self._advance()
            self.no_sample_has_two_live_owners()

    def _heartbeat(self, instance: Instance) -> None:
        request = HeartbeatRequest(
            run_id="run",
            attempt=1,
            instance=instance.name,
            incarnation=instance.incarnation,
            draining=instance.draining,
            running=len(instance.running),
            waiting=len(instance.waiting),
            revoked=instance.given_back,
            not_revoked=[key.to_proto() for key in instance.not_revoked],
            progress=progress_proto({key: _tokens_there(draw) + 1 for key, draw in instance.running.items()}),
        )
        self.ledger.heartbeat(request, self.now)
        instance.given_back.clear()
        instance.not_revoked.clear()
        if instance.link != "deaf":
            arrives_at = self.now + (0 if instance.link == "well" else LEASE_S - 1)
            instance.answers.append((arrives_at, self.ledger.answer(instance.name, instance.incarnation)))
            self._hear(instance)
        if instance.link == "last words":
            instance.link = "mute"

    def _hear(self, instance: Instance) -> None:
        while instance.answers and instance.answers[0][0] <= self.now:
            _, answer = instance.answers.pop(0)
            if not answer.lease_granted:
                instance.lose_everything()
                return
            instance.heard_at = self.now
            self._read(instance)
            for key in map(SampleKey.from_proto, answer.revoke):
                self._give_back(instance, key, instance.waiting.pop(key, None) or instance.running.pop(key, None))
            for key in map(SampleKey.from_proto, answer.revoke_unstarted):
                self._give_back(instance, key, instance.waiting.pop(key, None))
            for key in map(SampleKey.from_proto, answer.hand_over):
                begun = instance.running.pop(key, None)
                if begun is not None:
                    begun = SampleDraw(sample=begun.sample, dispatch=begun.dispatch, prefix=_longer(begun))
                self._give_back(instance, key, begun or instance.waiting.pop(key, None))

    def _give_back(self, instance: Instance, key: SampleKey, draw: SampleDraw | None) -> None:
        if draw is None:
            instance.not_revoked.append(key)
        else:
            prefix = draw.prefix if draw.HasField("prefix") else None
            instance.given_back.append(GivenBack(id=key.to_proto(), dispatch=draw.dispatch, prefix=prefix))

    def move(self, source: str, target: str, which: int) -> None:
        """The scheduler finds that a sample had better be elsewhere."""
        lives = {life.name: life for life in self.ledger.registry.lives()}
        if source in lives and target in lives and (keys := sorted(lives[source].samples)):
            key = keys[which % len(keys)]
            dispatch = lives[source].samples[key].dispatch
            wish = Wish(key, dispatch, lives[source], lives[target], begun=which % 2 == 0)
            self.ledger.ask_for_moves([wish], self.now)
            self._advance()

    def work(self, name: str) -> None:
        instance = self.instances[name]
        if instance.registered:
            self._read(instance)
            for key in list(instance.waiting)[: MAX_RUNNING - len(instance.running)]:
                instance.running[key] = instance.waiting.pop(key)

    def _read(self, instance: Instance) -> None:
        for assignment in self.partitions[instance.partition][instance.read :]:
            if assignment.incarnation == instance.incarnation:
                for key, draw in zip(_samples(assignment), assignment.draws, strict=True):
                    assert list(draw.prefix.token_ids) == list(range(_tokens_there(draw)))
                    instance.waiting[key] = draw
        instance.read = len(self.partitions[instance.partition])
        if instance.draining:
            for key in list(instance.waiting):
                self._give_back(instance, key, instance.waiting.pop(key))

    def finish(self, name: str, *, usable: bool) -> None:
        instance = self.instances[name]
        for key in list(instance.running)[:1]:
            dispatch = instance.running.pop(key).dispatch
            self.on_their_way.append(Rollout(key, name, instance.incarnation, dispatch, usable))

    def kill(self, name: str, *, loses_records: bool) -> None:
        """The process ends, and what it had not delivered yet may be lost with it."""
        self.instances[name].lose_everything()
        if loses_records:
            self.on_their_way = [rollout for rollout in self.on_their_way if rollout.instance != name]

    def drain(self, name: str) -> None:
        instance = self.instances[name]
        if instance.registered and not instance.draining:
            instance.draining = True
            self._read(instance)
            self._say_drain(instance, stopped=False)

    def stop(self, name: str) -> None:
        instance = self.instances[name]
        if instance.registered and instance.draining and not instance.running:
            self._say_drain(instance, stopped=True)
            instance.lose_everything()

    def _say_drain(self, instance: Instance, *, stopped: bool) -> None:
        request = DrainRequest(
            run_id="run", attempt=1, instance=instance.name, incarnation=instance.incarnation, stopped=stopped
        )
        self.ledger.drain(request, self.now)
        self._advance()

    def go_on(self, *, again: bool) -> None:
        """A second in which everybody works."""
        for name in NAMES:
            self.register(name)
            self.work(name)
            for _ in range(MAX_RUNNING // 2):
                self.finish(name, usable=True)
        on_their_way, self.on_their_way = self.on_their_way, []
        for rollout in on_their_way:
            self._take(rollout)
        self.report(again=again)
        self.write_batch(num_groups=5, num_samples=2)
        self.wait(1)

    # The scheduler.

    def restart_scheduler(self) -> None:
        """A new process reads the topic from the beginning; streams to the old one have broken."""
        self.lives += 1
        self.ledger = Ledger(self.settings, incarnation=1000 * self.lives, started_at=self.now)
        self.draft, self.planned = None, []
        if self.version >= 0:
            self.ledger.announce(self.version, 1)
        for record in self.log:
            self.ledger.take_record(record)
        for instance in self.instances.values():
            instance.answers.clear()

    def _advance(self) -> None:
        self.ledger.advance(self.now)
        while not (self.late_dispatches and self.chance.random() < 0.3):
            if not self.planned:
                self.draft = self.ledger.draft(self.now)
                if self.draft is None:
                    self._plan_ahead()
                    self.ledger.balance(self.now)
                    break
                for _ in self.draft.parts():
                    pass
                self.planned = [placing for part in self.draft.plan() for placing in part]
            else:
                self._carry_out(self.chance.randint(1, 4))
        for life in self.ledger.take_news():
            instance = self.instances[life.name]
            if instance.incarnation == life.incarnation and (life.ended or life.heard_lately(self.now)):
                # It cannot overtake what was said before.
                arrives_at = max([self.now + LEASE_S / 2 - 1, *(at for at, _ in instance.answers)])
                instance.answers.append((arrives_at, self.ledger.answer(life.name, life.incarnation)))

    def _plan_ahead(self) -> None:
        draft = self.ledger.draft_ahead(self.now)
        if draft is not None:
            for _ in draft.parts():
                pass
            draft.plan()

    def _carry_out(self, num_placings: int) -> None:
        assert self.draft is not None
        part, self.planned = self.planned[:num_placings], self.planned[num_placings:]
        for outgoing in self.ledger.carry_out(self.draft, part, self.now):
            self._check_version(outgoing.assignment)
            assert not self.told.intersection(_samples(outgoing.assignment))
            self.partitions[outgoing.partition].append(outgoing.assignment)

    def _check_version(self, assignment: Assignment) -> None:
        assert assignment.min_weight_version <= self.version
        if assignment.purpose == PURPOSE_EVALUATION:
            assert assignment.exact_weight_version == assignment.batch
        else:
            assert assignment.min_weight_version == required_version(assignment.batch, MAX_STALENESS)
            assert not assignment.HasField("exact_weight_version")

    # What must hold.

    def no_sample_has_two_live_owners(self) -> None:
        holders: Counter[SampleKey] = Counter()
        for instance in self.instances.values():
            if instance.registered:
                unread = [
                    key
                    for assignment in self.partitions[instance.partition][instance.read :]
                    if assignment.incarnation == instance.incarnation
                    for key in _samples(assignment)
                ]
                holders.update({*instance.waiting, *instance.running, *unread})
        assert not [key for key, count in holders.items() if count > 1]

    def the_books_agree(self) -> None:
        owned: Counter[str] = Counter()
        for batch in self.ledger.samples.batches.values():
            samples = [sample for group in batch.groups.values() for sample in group.samples]
            assert +batch.counts == Counter(sample.state for sample in samples)
            at = Counter(sample.owner.name for sample in samples if sample.owner is not None)
            assert +batch.outstanding_at == at
            owned += at
            for sample in samples:
                assert (sample.owner is not None) == (sample.state is SampleState.ASSIGNED)
                assert sample.owner is None or sample.owner.samples[sample.key] is sample
                assert sample.attempts_used <= 2
        for life in self.ledger.registry.lives():
            assert len(life.samples) == owned[life.name]
            assert life.outstanding_tokens == sum(sample.expected_tokens for sample in life.samples.values())
            assert not (life.ended and life.samples)

    def come_to_an_end(self) -> None:
        """Without further faults everything does."""
        self.late_dispatches = False
        for _ in range(60):
            for name in NAMES:
                self.instances[name].link = "well"
                self.register(name)
                self.work(name)
                if self.instances[name].draining:
                    self.stop(name)
                for _ in range(MAX_RUNNING):
                    self.finish(name, usable=True)
            on_their_way, self.on_their_way = self.on_their_way, []
            for rollout in on_their_way:
                self._take(rollout)
            self.report(again=False)
            self.publish()
            self.wait(2)
            self.the_books_agree()
        assert not self.wanted, f"{self.wanted} never came to an end"
        assert not self.ledger.samples.batches
        for record in self.log:
            if record.WhichOneof("kind") == "prompt":
                prompt = record.prompt
                for sample in range(prompt.num_samples):
                    key = SampleKey(prompt.purpose, prompt.batch, prompt.group, sample)
                    given_up = self.resolved[key].outcome == OUTCOME_DROPPED
                    assert given_up == (key in self.abandoned)


WEIGHTS = {
    "go on": 20, "wait": 12, "link": 12, "work": 10, "finish": 10, "receive": 8, "report": 8, "write": 6, "evaluate": 3,
    "publish": 6, "register": 8, "drain": 2, "stop": 4, "kill": 3, "restart": 2, "move": 15,
}  # fmt: skip
"""How often each thing happens."""


def _do_something(fleet: Fleet, chance: random.Random) -> None:
    name = chance.choice(NAMES)
    match chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]:
        case "go on":
            fleet.go_on(again=chance.random() < 0.3)
        case "wait":
            fleet.wait(chance.choice([1, 1, 2, 3, 4, LEASE_S]))
        case "link":
            fleet.instances[name].link = chance.choice(LINKS)
        case "work":
            fleet.work(name)
        case "finish":
            fleet.finish(name, usable=chance.random() < 0.7)
        case "receive":
            fleet.receive(chance.randrange(100), again=chance.random() < 0.3)
        case "report":
            fleet.report(again=chance.random() < 0.5)
        case "write":
            fleet.write_batch(chance.randint(1, 5), chance.randint(1, 3))
        case "evaluate":
            fleet.write_evaluation(chance.randint(1, 3))
        case "publish":
            fleet.publish()
        case "register":
            fleet.register(name)
        case "drain":
            fleet.drain(name)
        case "stop":
            fleet.stop(name)
        case "kill":
            fleet.kill(name, loses_records=chance.random() < 0.5)
        case "move":
            fleet.move(name, chance.choice(NAMES), chance.randrange(100))
        case "restart":
            fleet.restart_scheduler()


@pytest.mark.parametrize("policy", ["longest_first", "round_robin", "random"])
@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_lost_early_or_in_two_hands_whatever_happens(policy: str, seed: int) -> None:
    chance = random.Random(seed)
    fleet = Fleet(policy, chance)
    for _ in range(400):
        _do_something(fleet, chance)
        fleet.no_sample_has_two_live_owners()
        fleet.the_books_agree()
    fleet.come_to_an_end()
