"""Whatever moves between instances, each sample is generated once and accepted once."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scheduler_svc.ledger import Ledger
from scheduler_svc.settings import SchedulerSection, SchedulerSettings
from streamrl.identity import PURPOSE_TRAIN, SampleKey
from streamrl.planning.dispatch import POLICIES
from streamrl.settings import RunSection, SamplingView
from streamrl.v1.records_pb2 import Assignment, BatchEnd, Prompt, PromptRecord
from streamrl.v1.sample_pb2 import SamplingSettings
from streamrl.v1.scheduler_pb2 import (
    OUTCOME_ACCEPTED,
    GivenBack,
    HeartbeatRequest,
    RegisterRequest,
    ReportBatchRequest,
    SampleOutcome,
)
from tests.scheduler_svc.dispatching import decide


class Instance:
    """Begins what it has by priority, in a few places; the news that it has come late by as much as the test wants."""

    def __init__(self, name: str, places: int, incarnation: int) -> None:
        self.name, self.places, self.incarnation = name, places, incarnation
        self.waiting: list[tuple[int, SampleKey]] = []
        self.running: list[SampleKey] = []
        self.revoked: list[SampleKey] = []
        self.not_revoked: list[SampleKey] = []

    def take(self, assignment: Assignment) -> None:
        for draw in assignment.draws:
            key = SampleKey(assignment.purpose, assignment.batch, assignment.group, draw.sample)
            self.waiting.append((assignment.priority, key))
        self.begin()

    def begin(self) -> None:
        self.waiting.sort()
        while self.waiting and len(self.running) < self.places:
            self.running.append(self.waiting.pop(0)[1])

    def give_back(self, keys: list[SampleKey]) -> None:
        for key in keys:
            if key in (waiting for _, waiting in self.waiting):
                self.waiting = [(priority, other) for priority, other in self.waiting if other != key]
                self.revoked.append(key)
            elif key not in self.revoked:
                self.not_revoked.append(key)


class World:
    """A ledger, its instances and the trainer."""

    def __init__(self, policy: str, places: list[int], groups: list[int]) -> None:
        run = RunSection(id="run", seed=1)
        scheduler = SchedulerSection(lease_s=10.0, dispatch=policy)
        self.ledger = Ledger(
            SchedulerSettings(run=run, generator=SamplingView(num_instances=1), scheduler=scheduler),
            incarnation=1,
            started_at=-10.0,
        )
        self.instances: list[Instance] = []
        self.finished: list[SampleKey] = []
        self.late = places[1:]
        self.ledger.report(ReportBatchRequest(run_id="run", attempt=1, complete=True))
        self.ledger.announce(0, 1)
        self.join(places[0])
        for group, num_samples in enumerate(groups):
            prompt = Prompt(
                purpose=PURPOSE_TRAIN, batch=0, group=group, num_samples=num_samples, prompt_id=str(group),
                token_ids=[1], sampling=SamplingSettings(temperature=1.0, max_tokens=50),
            )  # fmt: skip
            self.ledger.take_record(PromptRecord(attempt=1, prompt=prompt))
        self.ledger.take_record(
            PromptRecord(attempt=1, batch_end=BatchEnd(purpose=PURPOSE_TRAIN, batch=0, num_groups=len(groups)))
        )
        self.advance()

    def join(self, places: int) -> None:
        name = f"generator-{len(self.instances)}"
        request = RegisterRequest(run_id="run", attempt=1, instance=name, max_running=places)
        self.instances.append(Instance(name, places, self.ledger.register(request, 0.0).incarnation))

    def advance(self) -> None:
        by_incarnation = {instance.incarnation: instance for instance in self.instances}
        for outgoing in decide(self.ledger, 1.0):
            by_incarnation[outgoing.assignment.incarnation].take(outgoing.assignment)

    def finish(self, instance: Instance, which: int) -> None:
        if instance.running:
            key = instance.running.pop(which % len(instance.running))
            self.finished.append(key)
            outcome = SampleOutcome(id=key.to_proto(), outcome=OUTCOME_ACCEPTED, num_tokens=1 + which)
            self.ledger.report(ReportBatchRequest(run_id="run", attempt=1, outcomes=[outcome]))
            instance.begin()

    def speak(self, instance: Instance, *, again: bool) -> None:
        """A heartbeat and its answer; `again`: the instance is not sure that it was heard, and says all once more."""
        revoked, not_revoked = list(instance.revoked), list(instance.not_revoked)
        request = HeartbeatRequest(
            run_id="run", attempt=1, instance=instance.name, incarnation=instance.incarnation,
            running=len(instance.running), waiting=len(instance.waiting),
            revoked=[GivenBack(id=key.to_proto()) for key in revoked],
            not_revoked=[key.to_proto() for key in not_revoked],
        )  # fmt: skip
        self.ledger.heartbeat(request, 1.0)
        if not again:
            instance.revoked, instance.not_revoked = [], []
        answer = self.ledger.answer(instance.name, instance.incarnation)
        instance.give_back([SampleKey.from_proto(sample_id) for sample_id in answer.revoke_unstarted])


@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(
    places=st.lists(st.integers(1, 4), min_size=2, max_size=3),
    groups=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    events=st.lists(
        st.tuples(st.sampled_from(["finish", "speak", "repeat", "join", "advance"]), st.integers(0, 9)), max_size=60
    ),
)
def test_each_sample_is_generated_and_accepted_once(
    policy: str, places: list[int], groups: list[int], events: list[tuple[str, int]]
) -> None:
    world = World(policy, places, groups)
    for event, which in events:
        instance = world.instances[which % len(world.instances)]
        if event == "finish":
            world.finish(instance, which)
        elif event == "join" and world.late:
            world.join(world.late.pop())
        elif event in ("speak", "repeat"):
            world.speak(instance, again=event == "repeat")
        else:
            world.advance()
    for _ in range(200):
        for instance in world.instances:
            world.speak(instance, again=False)
            world.finish(instance, 0)
            world.advance()
    wanted = [SampleKey(PURPOSE_TRAIN, 0, group, sample) for group, size in enumerate(groups) for sample in range(size)]
    assert sorted(world.finished) == wanted
    batch = world.ledger.samples.batches[wanted[0].batch_key]
    assert not batch.outstanding_at.total()
    assert not batch.abandoned
