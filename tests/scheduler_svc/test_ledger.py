"""Each rule of the ledger, one by one. What they give together is in test_ledger_properties.py."""

import sys
from collections.abc import Iterable
from typing import Any

import pytest

from scheduler_svc import dispatcher
from scheduler_svc.fleet_view import fleet_view, waits
from scheduler_svc.ledger import Ledger
from scheduler_svc.settings import SchedulerSection, SchedulerSettings
from streamrl.errors import RecordError, RefusedError, StaleAttemptError, UnavailableError
from streamrl.identity import PURPOSE_EVALUATION, PURPOSE_TRAIN, BatchKey, SampleKey, sample_seed
from streamrl.planning.dispatch import plan
from streamrl.planning.iteration import TrainerPace as PlannedPace
from streamrl.settings import PipelineSection, RunSection, SamplingView, WeightsSection
from streamrl.v1.records_pb2 import Assignment, BatchEnd, Prompt, PromptRecord, RunEnd
from streamrl.v1.sample_pb2 import SamplingSettings
from streamrl.v1.scheduler_pb2 import (
    FLEET_PHASE_GENERATE,
    FLEET_PHASE_TRAIN,
    FLEET_PHASE_UNSPECIFIED,
    INSTANCE_STATE_DEAD,
    INSTANCE_STATE_DRAINING,
    OUTCOME_ACCEPTED,
    OUTCOME_DROPPED,
    OUTCOME_REJECTED,
    ClosedBatch,
    DrainRequest,
    GivenBack,
    HeartbeatRequest,
    RegisterRequest,
    ReportBatchRequest,
    ReportBatchResponse,
    SampleOutcome,
    TrainerPace,
)
from tests.scheduler_svc.dispatching import decide

LEASE_S = 10.0
FIRST_INCARNATION = 1000


class Scene:
    """A ledger, a clock that is moved by hand, and short words for what happens."""

    def __init__(
        self,
        *,
        num_instances: int = 1,
        max_staleness: int = 1,
        attempt: int = 1,
        weights: WeightsSection | None = None,
        **scheduler: Any,
    ) -> None:
        self.settings = SchedulerSettings(
            run=RunSection(id="run", seed=7, attempt=attempt),
            pipeline=PipelineSection(mode="async" if max_staleness else "sync", max_staleness=max_staleness),
            generator=SamplingView(num_instances=num_instances),
            weights=weights or WeightsSection(),
            scheduler=SchedulerSection(**{"lease_s": LEASE_S, "fleet_wait_s": 60.0, **scheduler}),
        )
        self.ledger = Ledger(self.settings, incarnation=FIRST_INCARNATION, started_at=-LEASE_S)
        self.now = 0.0
        self.incarnations: dict[str, int] = {}

    def prompt(self, batch: int, group: int, num_samples: int = 2, purpose: int = PURPOSE_TRAIN, **other: Any) -> None:
        fields = {
            "prompt_id": f"p{group}",
            "token_ids": [1, 2, group],
            "sampling": SamplingSettings(temperature=1.0, max_tokens=100),
            **other,
        }
        prompt = Prompt(purpose=purpose, batch=batch, group=group, num_samples=num_samples, **fields)  # type: ignore[arg-type]
        self.record(prompt=prompt)

    def end(self, batch: int, num_groups: int, purpose: int = PURPOSE_TRAIN) -> None:
        self.record(batch_end=BatchEnd(purpose=purpose, batch=batch, num_groups=num_groups))  # type: ignore[arg-type]

    def record(self, attempt: int | None = None, **kind: Any) -> None:
        attempt = self.settings.run.attempt if attempt is None else attempt
        self.ledger.take_record(PromptRecord(attempt=attempt, **kind))

    def batch(self, batch: int, num_groups: int = 2, num_samples: int = 2, purpose: int = PURPOSE_TRAIN) -> None:
        for group in range(num_groups):
            self.prompt(batch, group, num_samples, purpose)
        self.end(batch, num_groups, purpose)

    def version(self, weight_version: int) -> None:
        self.ledger.announce(weight_version, self.settings.run.attempt)

    def register(self, name: str = "generator-0", **fields: Any) -> int:
        request = RegisterRequest(
            **{"run_id": "run", "attempt": self.settings.run.attempt, "instance": name, "max_running": 8, **fields}
        )
        response = self.ledger.register(request, self.now)
        self.incarnations[name] = response.incarnation
        return response.partition

    def heartbeat(self, name: str = "generator-0", **fields: Any) -> None:
        request = HeartbeatRequest(
            run_id="run",
            attempt=self.settings.run.attempt,
            instance=name,
            incarnation=self.incarnations[name],
            **fields,
        )
        self.ledger.heartbeat(request, self.now)

    def drain(self, name: str = "generator-0", *, stopped: bool = False) -> None:
        self.ledger.drain(
            DrainRequest(
                run_id="run",
                attempt=self.settings.run.attempt,
                instance=name,
                incarnation=self.incarnations[name],
                stopped=stopped,
            ),
            self.now,
        )

    def report(self, outcomes: Iterable[SampleOutcome] = (), **fields: Any) -> ReportBatchResponse:
        request = ReportBatchRequest(
            **{"run_id": "run", "attempt": self.settings.run.attempt, "outcomes": list(outcomes), **fields}
        )
        return self.ledger.report(request)

    def advance(self, seconds: float = 0.0) -> list[Assignment]:
        self.now += seconds
        return [outgoing.assignment for outgoing in decide(self.ledger, self.now)]

    def ready(self, *names: str) -> "Scene":
        """The trainer has reported, version 0 is there, and these instances have registered."""
        self.report(complete=True)
        self.version(0)
        for name in names or ("generator-0",):
            self.register(name)
        return self

    def revokes(self, name: str = "generator-0") -> list[SampleKey]:
        answer = self.ledger.answer(name, self.incarnations[name])
        return [SampleKey.from_proto(sample_id) for sample_id in answer.revoke]


def _key(batch: int, group: int, sample: int, purpose: int = PURPOSE_TRAIN) -> SampleKey:
    return SampleKey(purpose, batch, group, sample)


def _outcome(key: SampleKey, outcome: int = OUTCOME_ACCEPTED, **fields: Any) -> SampleOutcome:
    return SampleOutcome(id=key.to_proto(), outcome=outcome, **fields)  # type: ignore[arg-type]


def _samples(assignments: Iterable[Assignment]) -> list[SampleKey]:
    return sorted(
        SampleKey(assignment.purpose, assignment.batch, assignment.group, draw.sample)
        for assignment in assignments
        for draw in assignment.draws
    )


def _keys(batch: int, num_groups: int = 2, num_samples: int = 2) -> list[SampleKey]:
    return [_key(batch, group, sample) for group in range(num_groups) for sample in range(num_samples)]


# What is written.


def test_a_batch_is_assigned_as_a_whole_with_all_that_an_instance_needs() -> None:
    scene = Scene().ready()
    scene.batch(0)
    assignments = scene.advance()
    assert _samples(assignments) == _keys(0)
    first = assignments[0]
    assert (first.attempt, first.incarnation) == (1, FIRST_INCARNATION)
    assert (first.purpose, first.batch, first.group, first.prompt_id) == (PURPOSE_TRAIN, 0, 0, "p0")
    assert (list(first.token_ids), first.sampling.max_tokens) == ([1, 2, 0], 100)
    assert [(draw.sample, draw.seed, draw.dispatch) for draw in first.draws] == [
        (sample, sample_seed(7, _key(0, 0, sample)), 1) for sample in range(2)
    ]
    assert first.min_weight_version == 0
    assert not first.HasField("exact_weight_version")
    assert scene.advance() == []


def test_groups_are_kept_together_when_there_are_enough_of_them() -> None:
    scene = Scene(num_instances=2).ready("a", "b")
    scene.batch(0, num_groups=8, num_samples=4)
    assert [len(assignment.draws) for assignment in scene.advance()] == [4] * 8


def test_instances_get_their_own_partition_and_equal_shares() -> None:
    scene = Scene(num_instances=2).ready("a", "b")
    scene.batch(0, num_groups=16, num_samples=4)
    outgoing = decide(scene.ledger, 0.0)
    assert sorted(record.partition for record in outgoing) == [0] * 8 + [1] * 8


def test_the_longest_expected_come_first() -> None:
    scene = Scene().ready()
    scene.batch(0, num_groups=4)
    scene.advance()
    lengths = {0: 30, 1: 90, 2: 10, 3: 60}
    scene.report(_outcome(key, num_tokens=lengths[key.group]) for key in _keys(0, 4))
    scene.version(1)
    scene.batch(1, num_groups=4)
    assignments = scene.advance()
    assert [assignment.group for assignment in assignments] == [1, 3, 0, 2]
    priorities = [assignment.priority for assignment in assignments]
    assert priorities == sorted(priorities)


def test_the_random_policy_leaves_the_order_of_arrival() -> None:
    scene = Scene(dispatch="random").ready()
    scene.batch(0, num_groups=4)
    assignments = scene.advance()
    assert [assignment.group for assignment in assignments] == [0, 1, 2, 3]
    assert len({assignment.priority for assignment in assignments}) == 1


def test_an_assignment_that_no_record_can_carry_is_given_up() -> None:
    scene = Scene().ready()
    scene.batch(0, num_groups=1)
    [assignment] = scene.advance()
    scene.ledger.undeliverable(assignment, "too large")
    assert [abandoned.reason for abandoned in scene.report().abandoned] == ["too large"] * 2


# Admission.


def test_a_batch_waits_for_the_version_that_its_staleness_allows() -> None:
    scene = Scene(max_staleness=2).ready()
    scene.batch(3)
    assert scene.advance() == []
    assert "batch 3 waits for version 1" in list(waits(scene.ledger, scene.now))
    scene.version(1)
    assert {assignment.min_weight_version for assignment in scene.advance()} == {1}


def test_an_evaluation_waits_for_its_version_and_is_pinned_to_it() -> None:
    scene = Scene().ready()
    scene.batch(2, purpose=PURPOSE_EVALUATION)
    scene.version(1)
    assert scene.advance() == []
    scene.version(2)
    assert {assignment.exact_weight_version for assignment in scene.advance()} == {2}


def test_with_one_version_a_batch_every_assignment_of_it_asks_for_that_version() -> None:
    """Also what is dispatched later, when newer versions are there."""
    scene = Scene(num_instances=2, max_staleness=2, weights=WeightsSection(one_version_per_batch=True)).ready("a", "b")
    scene.version(1)
    scene.batch(3)
    first = scene.advance()
    scene.version(2)
    scene.drain("a", stopped=True)
    again = scene.advance(3 * LEASE_S)
    assert {assignment.exact_weight_version for assignment in first + again} == {1}
    assert all(assignment.HasField("exact_weight_version") for assignment in first + again)


def test_batches_that_become_admissible_together_start_in_order() -> None:
    scene = Scene(max_staleness=2).ready()
    for batch in (2, 0, 1):
        scene.batch(batch)
    scene.batch(0, purpose=PURPOSE_EVALUATION)
    assert [(assignment.purpose, assignment.batch) for assignment in scene.advance()] == [
        (PURPOSE_EVALUATION, 0), (PURPOSE_EVALUATION, 0),
        *((PURPOSE_TRAIN, batch) for batch in (0, 0, 1, 1, 2, 2)),
    ]  # fmt: skip


def test_a_batch_waits_for_all_prompts_that_its_end_counts() -> None:
    scene = Scene().ready()
    scene.prompt(0, 0)
    assert scene.advance() == []
    scene.end(0, 2)
    assert scene.advance() == []
    assert "batch 0 waits for prompts: 1 of 2" in list(waits(scene.ledger, scene.now))
    scene.prompt(0, 1)
    assert _samples(scene.advance()) == _keys(0)


def test_a_later_end_with_a_higher_count_reopens_a_batch() -> None:
    scene = Scene().ready()
    scene.batch(0, num_groups=2)
    scene.advance()
    scene.prompt(0, 2)
    assert scene.advance() == []
    scene.end(0, 3)
    assert _samples(scene.advance()) == [_key(0, 2, 0), _key(0, 2, 1)]


def test_a_record_that_is_read_again_changes_nothing() -> None:
    scene = Scene().ready()
    scene.batch(0)
    scene.advance()
    scene.batch(0)
    assert scene.advance() == []


def test_a_version_that_is_forgotten_by_a_resumed_run_admits_no_more() -> None:
    scene = Scene().ready()
    scene.version(5)
    scene.version(2)
    scene.batch(4)
    assert scene.advance() == []
    scene.version(3)
    assert _samples(scene.advance()) == _keys(4)


def test_prompts_that_an_earlier_attempt_wrote_are_passed_over() -> None:
    scene = Scene(attempt=2).ready()
    scene.record(attempt=1, batch_end=BatchEnd(purpose=PURPOSE_TRAIN, batch=0, num_groups=1))
    assert not scene.ledger.samples.batches


def test_a_version_that_an_earlier_attempt_published_starts_nothing() -> None:
    scene = Scene(attempt=2).ready()
    scene.batch(4)
    scene.ledger.announce(6, attempt=1)
    assert scene.advance() == []
    scene.version(3)
    assert _samples(scene.advance()) == _keys(4)


def test_a_record_or_version_of_a_later_attempt_ends_this_process() -> None:
    scene = Scene()
    with pytest.raises(StaleAttemptError, match="attempt 2 of the run writes prompts"):
        scene.record(attempt=2, run_end=RunEnd())
    with pytest.raises(StaleAttemptError, match="version 3 is of attempt 2"):
        scene.ledger.announce(3, attempt=2)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ({"purpose": 0}, "purpose 0 is unknown"),
        ({"batch": -1}, "batch -1 is negative"),
        ({"group": -1}, "group -1 is negative"),
        ({"num_samples": 0}, "num_samples is 0"),
        ({"token_ids": []}, "no tokens"),
        ({"sampling": SamplingSettings()}, "max_tokens is 0"),
    ],
)
def test_a_prompt_that_makes_no_sense_is_a_bad_record(prompt: dict[str, Any], reason: str) -> None:
    with pytest.raises(RecordError, match=reason):
        Scene().prompt(**{"batch": 0, "group": 0, **prompt})


def test_a_prompt_that_contradicts_an_earlier_one_is_a_bad_record() -> None:
    scene = Scene()
    scene.prompt(0, 0)
    with pytest.raises(RecordError, match="came before with another prompt"):
        scene.prompt(0, 0, token_ids=[9])


def test_ends_without_sense_and_empty_records_are_bad_records() -> None:
    with pytest.raises(RecordError, match="num_groups is 0"):
        Scene().end(0, 0)
    with pytest.raises(RecordError, match="neither a prompt nor an end"):
        Scene().record()


# When dispatch may begin.


def test_nothing_is_dispatched_before_the_fleet_is_there() -> None:
    scene = Scene(num_instances=2).ready("a")
    scene.batch(0)
    assert scene.advance() == []
    assert "1 of 2 instances registered" in list(waits(scene.ledger, scene.now))
    scene.register("b")
    assert _samples(scene.advance()) == _keys(0)


def test_the_fleet_is_waited_for_only_so_long() -> None:
    scene = Scene(num_instances=2, lease_s=1000.0)
    scene.ledger = Ledger(scene.settings, incarnation=FIRST_INCARNATION, started_at=-1000.0)
    scene.ready("a")
    scene.batch(0)
    assert scene.ledger.next_deadline(0.0) == 60.0
    assert scene.advance(59.9) == []
    assert _samples(scene.advance(0.1)) == _keys(0)


def test_nothing_is_dispatched_before_the_trainer_has_reported_everything() -> None:
    scene = Scene()
    scene.version(0)
    scene.register()
    scene.batch(0)
    scene.report()
    assert scene.advance() == []
    assert "the trainer has not reported to this scheduler yet" in list(waits(scene.ledger, scene.now))
    scene.report(complete=True)
    assert _samples(scene.advance()) == _keys(0)


def test_a_new_life_of_the_scheduler_outwaits_the_leases_of_the_one_before() -> None:
    scene = Scene()
    scene.ledger = Ledger(scene.settings, incarnation=2000, started_at=0.0)
    scene.ready()
    scene.batch(0)
    assert scene.advance(9.9) == []
    assert scene.ledger.next_deadline(9.9) == LEASE_S
    scene.heartbeat()
    assert _samples(scene.advance(0.1)) == _keys(0)


def test_after_a_restart_only_what_is_still_wanted_is_dispatched() -> None:
    """The trainer's report may come before or after the prompts have been read again."""
    scene = Scene()
    scene.version(2)
    scene.register()
    outcomes = [_outcome(_key(1, 0, 0), num_tokens=9), _outcome(_key(1, 1, 1), OUTCOME_DROPPED)]
    scene.batch(0)
    scene.prompt(1, 0)
    scene.report(outcomes, closed=[ClosedBatch(purpose=PURPOSE_TRAIN, batch=0)], complete=True)
    scene.prompt(1, 1)
    scene.end(1, 2)
    scene.batch(0)
    assert _samples(scene.advance()) == [_key(1, 0, 1), _key(1, 1, 0)]
    assert scene.ledger.samples.lengths.history.expected_tokens("p0", 100) == 9


def test_samples_wait_when_no_instance_is_live_and_go_to_the_next_one() -> None:
    scene = Scene().ready()
    scene.advance()
    scene.advance(2 * LEASE_S)
    scene.batch(0)
    assert scene.advance() == []
    assert {"no instance is live", "batch 0: 4 of 4 samples wait for an instance"} <= set(
        waits(scene.ledger, scene.now)
    )
    scene.register("late")
    assert _samples(scene.advance()) == _keys(0)


# Instances.


def test_incarnations_rise_and_are_never_given_twice() -> None:
    scene = Scene(num_instances=2).ready("a", "b", "a")
    assert scene.incarnations == {"a": FIRST_INCARNATION + 2, "b": FIRST_INCARNATION + 1}


def test_an_instance_keeps_its_partition_over_its_lives() -> None:
    scene = Scene()
    assert (scene.register("a"), scene.register("b"), scene.register("a")) == (0, 1, 0)


def test_a_partition_is_taken_only_from_the_dead_and_only_when_it_is_needed() -> None:
    scene = Scene(max_instances=2)
    scene.register("a")
    scene.register("b")
    with pytest.raises(RefusedError, match=r"scheduler\.max_instances is 2"):
        scene.register("c")
    scene.now = LEASE_S
    scene.heartbeat("b")
    scene.advance(LEASE_S)
    assert scene.register("c") == 0
    assert [life.name for life in scene.ledger.registry.lives()] == ["b", "c"]


def test_a_registration_without_name_or_room_is_refused() -> None:
    for fields in ({"instance": ""}, {"max_running": 0}):
        with pytest.raises(ValueError, match="expected a name and max_running of 1 or more"):
            Scene().register(**{"name": "a", **fields})


def test_calls_of_another_run_or_attempt_are_refused() -> None:
    scene = Scene(attempt=2)
    with pytest.raises(RefusedError, match="run 'other' reached the scheduler of run 'run'"):
        scene.register(run_id="other")
    with pytest.raises(StaleAttemptError) as refusal:
        scene.register(attempt=1)
    assert refusal.value.current_attempt == 2
    # This scheduler is the one that is late: whoever called tries again until it has made way.
    with pytest.raises(UnavailableError):
        scene.register(attempt=3)
    assert scene.ledger.refused == 1


def test_an_instance_with_another_tokenizer_is_refused() -> None:
    scene = Scene()
    scene.report(tokenizer_digest="right")
    with pytest.raises(RefusedError, match="tokenizer of digest wrong, the trainer one of right"):
        scene.register(tokenizer_digest="wrong")
    scene.register(tokenizer_digest="right")


def test_an_instance_that_came_before_the_trainer_and_has_another_tokenizer_is_ended() -> None:
    scene = Scene()
    scene.register(tokenizer_digest="wrong")
    scene.report(tokenizer_digest="right")
    assert not scene.ledger.answer("generator-0", scene.incarnations["generator-0"]).lease_granted
    assert [life.name for life in scene.ledger.take_news()] == ["generator-0"]


def test_an_unknown_incarnation_gets_no_lease() -> None:
    scene = Scene()
    scene.register()
    assert scene.ledger.answer("generator-0", scene.incarnations["generator-0"]).lease_granted
    assert not scene.ledger.answer("generator-0", FIRST_INCARNATION - 1).lease_granted
    assert not scene.ledger.answer("nobody", FIRST_INCARNATION).lease_granted


def test_a_silent_instance_gets_no_work_and_loses_what_it_has_when_it_must_have_stopped() -> None:
    scene = Scene(num_instances=2).ready("a", "b")
    scene.batch(0, num_groups=8)
    scene.advance()
    lost = list(next(life for life in scene.ledger.registry.lives() if life.name == "a").samples)
    scene.now = LEASE_S
    scene.heartbeat("b")
    scene.batch(1)
    assert {assignment.incarnation for assignment in scene.advance()} == {scene.incarnations["b"]}
    assert "a has been silent for 10 s" in list(waits(scene.ledger, scene.now))
    assert scene.advance(LEASE_S - 0.1) == []
    scene.heartbeat("b")
    again = scene.advance(0.1)
    assert _samples(again) == sorted(lost)
    assert {draw.dispatch for assignment in again for draw in assignment.draws} == {2}
    assert scene.report().redispatched == len(lost)
    assert not scene.ledger.answer("a", scene.incarnations["a"]).lease_granted


def test_a_new_incarnation_has_lost_what_the_old_one_had() -> None:
    scene = Scene().ready()
    scene.batch(0)
    scene.advance()
    scene.register()
    again = scene.advance()
    assert _samples(again) == _keys(0)
    assert {assignment.incarnation for assignment in again} == {scene.incarnations["generator-0"]}


def test_what_a_draining_instance_gives_back_goes_to_others_at_once() -> None:
    scene = Scene(num_instances=2).ready("a", "b")
    scene.batch(0, num_groups=8)
    scene.advance()
    given_back = list(next(life for life in scene.ledger.registry.lives() if life.name == "a").samples)[:3]
    scene.heartbeat("a", draining=True, revoked=[GivenBack(id=key.to_proto()) for key in given_back])
    again = scene.advance()
    assert _samples(again) == sorted(given_back)
    assert {assignment.incarnation for assignment in again} == {scene.incarnations["b"]}
    states = {instance.instance: instance.state for instance in fleet_view(scene.ledger, scene.now).instances}
    assert states["a"] == INSTANCE_STATE_DRAINING


def test_what_a_stopped_instance_had_goes_to_others_a_lease_later() -> None:
    scene = Scene(num_instances=2).ready("a", "b")
    scene.batch(0, num_groups=8)
    scene.advance()
    had = list(next(life for life in scene.ledger.registry.lives() if life.name == "a").samples)
    scene.drain("a")
    scene.now = 5.0
    scene.drain("a", stopped=True)
    late = [_outcome(had[0])]
    scene.report(late)
    scene.heartbeat("b")
    assert scene.advance(LEASE_S - 0.1) == []
    scene.heartbeat("b")
    assert _samples(scene.advance(0.1)) == sorted(had[1:])
    states = {instance.instance: instance.state for instance in fleet_view(scene.ledger, scene.now).instances}
    assert states["a"] == INSTANCE_STATE_DEAD


def test_what_is_given_back_after_the_stop_was_said_goes_to_others_at_once() -> None:
    """The two calls travel on streams of their own."""
    scene = Scene(num_instances=2).ready("a", "b")
    scene.batch(0, num_groups=8)
    scene.advance()
    had = list(next(life for life in scene.ledger.registry.lives() if life.name == "a").samples)
    scene.drain("a", stopped=True)
    scene.heartbeat("a", draining=True, revoked=[GivenBack(id=key.to_proto()) for key in had])
    assert _samples(scene.advance()) == sorted(had)


def test_a_drain_of_an_unknown_incarnation_is_no_error() -> None:
    scene = Scene()
    scene.incarnations["gone"] = 3
    scene.drain("gone", stopped=True)


def test_instances_are_told_of_versions_and_phases() -> None:
    scene = Scene().ready("a")
    scene.ledger.take_news()
    scene.version(1)
    assert [life.name for life in scene.ledger.take_news()] == ["a"]
    assert scene.ledger.answer("a", scene.incarnations["a"]).newest_weight_version == 1
    scene.ledger.set_phase(FLEET_PHASE_TRAIN)
    assert [life.name for life in scene.ledger.take_news()] == ["a"]
    assert scene.ledger.answer("a", scene.incarnations["a"]).phase == FLEET_PHASE_TRAIN
    assert scene.ledger.take_news() == []


def test_a_new_life_of_the_scheduler_leaves_the_fleet_as_it_is_until_the_trainer_has_said_the_phase() -> None:
    scene = Scene()
    scene.register("a")
    assert scene.ledger.answer("a", scene.incarnations["a"]).phase == FLEET_PHASE_UNSPECIFIED
    scene.report(complete=True, phase=FLEET_PHASE_TRAIN)
    assert scene.ledger.answer("a", scene.incarnations["a"]).phase == FLEET_PHASE_TRAIN


def test_a_late_report_does_not_undo_a_phase_that_was_asked_for() -> None:
    scene = Scene()
    scene.ledger.set_phase(FLEET_PHASE_GENERATE)
    scene.report(complete=True, phase=FLEET_PHASE_TRAIN)
    assert scene.ledger.phase == FLEET_PHASE_GENERATE


def test_a_phase_is_reached_when_everything_that_runs_has_confirmed_it() -> None:
    scene = Scene().ready("a", "b")
    scene.ledger.set_phase(FLEET_PHASE_TRAIN)
    scene.heartbeat("a", phase=FLEET_PHASE_TRAIN)
    scene.heartbeat("b", phase=FLEET_PHASE_GENERATE)
    assert not scene.ledger.phase_reached(FLEET_PHASE_TRAIN)
    scene.advance(LEASE_S)
    scene.heartbeat("a", phase=FLEET_PHASE_TRAIN)
    scene.advance(LEASE_S)
    assert scene.ledger.phase_reached(FLEET_PHASE_TRAIN)


def test_one_that_was_silent_for_half_its_lease_is_not_spoken_to_unasked() -> None:
    scene = Scene().ready("a")
    [life] = scene.ledger.registry.lives()
    assert life.heard_lately(LEASE_S / 2 - 0.1)
    assert not life.heard_lately(LEASE_S / 2)


# Outcomes.


def test_a_sample_is_outstanding_until_the_trainer_has_accepted_it() -> None:
    scene = Scene().ready()
    scene.batch(0)
    scene.advance()
    [state] = fleet_view(scene.ledger, scene.now).batches
    assert (state.num_samples, state.accepted, state.outstanding, state.undispatched) == (4, 0, 4, 0)
    scene.report([_outcome(_key(0, 0, 0))])
    [state] = fleet_view(scene.ledger, scene.now).batches
    assert (state.accepted, state.outstanding) == (1, 3)
    assert "batch 0: 3 of 4 samples outstanding at generator-0" in list(waits(scene.ledger, scene.now))
    assert scene.revokes() == []


def test_an_acceptance_that_is_said_twice_counts_once() -> None:
    scene = Scene().ready()
    scene.batch(0)
    scene.advance()
    for _ in range(2):
        scene.report([_outcome(_key(0, 0, 0), num_tokens=10)])
    [state] = fleet_view(scene.ledger, scene.now).batches
    assert (state.accepted, state.outstanding) == (1, 3)


def test_a_rejected_sample_is_dispatched_again() -> None:
    scene = Scene().ready()
    scene.batch(0)
    scene.advance()
    scene.report([_outcome(_key(0, 0, 0), OUTCOME_REJECTED, reason="failed")])
    [assignment] = scene.advance()
    assert _samples([assignment]) == [_key(0, 0, 0)]
    assert assignment.draws[0].dispatch == 2
    assert assignment.draws[0].seed == sample_seed(7, _key(0, 0, 0))


def test_a_rejection_that_comes_twice_does_not_take_the_sample_from_its_next_owner() -> None:
    scene = Scene().ready()
    scene.batch(0)
    scene.advance()
    rejection = _outcome(_key(0, 0, 0), OUTCOME_REJECTED, incarnation=scene.incarnations["generator-0"], dispatch=1)
    scene.report([rejection])
    assert len(scene.advance()) == 1
    scene.report([rejection])
    assert scene.advance() == []


def test_a_sample_is_given_up_after_so_many_dispatches_and_the_trainer_is_told_until_it_knows() -> None:
    scene = Scene(max_dispatches=2).ready()
    scene.batch(0, num_groups=1, num_samples=1)
    for _ in range(2):
        assert len(scene.advance()) == 1
        response = scene.report([_outcome(_key(0, 0, 0), OUTCOME_REJECTED, reason="engine died")])
    assert scene.advance() == []
    for told in (response, scene.report()):
        assert [(SampleKey.from_proto(given_up.id), given_up.reason) for given_up in told.abandoned] == [
            (_key(0, 0, 0), "dispatched 2 times, the last time rejected: engine died")
        ]
    assert not scene.report([_outcome(_key(0, 0, 0), OUTCOME_DROPPED)]).abandoned


def test_a_sample_that_was_given_up_and_comes_after_all_is_accepted() -> None:
    scene = Scene(max_dispatches=1).ready()
    scene.batch(0, num_groups=1, num_samples=1)
    scene.advance()
    assert len(scene.report([_outcome(_key(0, 0, 0), OUTCOME_REJECTED)]).abandoned) == 1
    assert not scene.report([_outcome(_key(0, 0, 0))]).abandoned
    [state] = fleet_view(scene.ledger, scene.now).batches
    assert state.accepted == 1


def test_samples_that_are_given_back_unstarted_are_not_used_up() -> None:
    scene = Scene(max_dispatches=1).ready()
    scene.batch(0, num_groups=1, num_samples=1)
    for dispatch in range(1, 5):
        [assignment] = scene.advance()
        assert assignment.draws[0].dispatch == dispatch
        scene.heartbeat(revoked=[GivenBack(id=_key(0, 0, 0).to_proto())])
    assert not scene.report().abandoned


def test_evaluation_samples_do_not_count_as_redispatched() -> None:
    scene = Scene().ready()
    scene.batch(0, purpose=PURPOSE_EVALUATION)
    scene.advance()
    scene.register()
    assert len(scene.advance()) == 2
    assert scene.report().redispatched == 0


def test_what_is_not_wanted_any_more_is_revoked_until_the_instance_has_answered() -> None:
    scene = Scene().ready()
    scene.batch(0)
    scene.advance()
    scene.report([_outcome(_key(0, 0, 0), OUTCOME_DROPPED), _outcome(_key(0, 0, 1), OUTCOME_DROPPED)])
    scene.ledger.take_news()
    assert scene.revokes() == scene.revokes() == [_key(0, 0, 0), _key(0, 0, 1)]
    scene.heartbeat(revoked=[GivenBack(id=_key(0, 0, 0).to_proto())], not_revoked=[_key(0, 0, 1).to_proto()])
    assert scene.revokes() == []
    assert scene.advance() == []


def test_a_closed_batch_is_forgotten_and_revoked() -> None:
    scene = Scene().ready()
    scene.batch(0)
    scene.advance()
    scene.report([_outcome(key) for key in _keys(0)[:3]], closed=[ClosedBatch(purpose=PURPOSE_TRAIN, batch=0)])
    assert scene.revokes() == [_keys(0)[3]]
    scene.register()
    scene.report([_outcome(_key(0, 0, 0), OUTCOME_REJECTED)])
    scene.batch(0)
    assert scene.advance() == []
    assert BatchKey(PURPOSE_TRAIN, 0) not in scene.ledger.samples.batches


def test_a_later_owner_is_told_when_an_earlier_one_has_delivered() -> None:
    scene = Scene().ready()
    scene.batch(0, num_groups=1, num_samples=1)
    scene.advance()
    scene.register()
    scene.advance()
    scene.report([_outcome(_key(0, 0, 0))])
    assert scene.revokes() == [_key(0, 0, 0)]


def test_a_sample_that_is_accepted_while_it_waits_is_not_dispatched_again() -> None:
    scene = Scene().ready()
    scene.batch(0, num_groups=1, num_samples=2)
    scene.advance()
    scene.advance(2 * LEASE_S)
    scene.report([_outcome(_key(0, 0, 0))])
    scene.register()
    assert _samples(scene.advance()) == [_key(0, 0, 1)]


def test_an_unknown_outcome_is_refused() -> None:
    with pytest.raises(ValueError, match="outcome 0 is unknown"):
        Scene().report([_outcome(_key(0, 0, 0), 0)])


# The view.


def test_dead_letters_are_summed_over_all_lives() -> None:
    scene = Scene()
    scene.register()
    scene.heartbeat(dead_letters=2)
    scene.register()
    scene.heartbeat(dead_letters=1)
    scene.ledger.dead_letters += 4
    assert fleet_view(scene.ledger, 0.0).dead_letters == 7


def test_the_view_says_when_there_is_nothing_to_do() -> None:
    scene = Scene().ready()
    scene.advance()
    assert list(waits(scene.ledger, 0.0)) == ["no prompts are here"]
    scene.record(run_end=RunEnd())
    assert list(waits(scene.ledger, 0.0)) == ["all batches are over"]


def test_the_view_says_that_a_batch_waits_for_the_trainer() -> None:
    scene = Scene().ready()
    scene.batch(0)
    scene.advance()
    scene.report(_outcome(key) for key in _keys(0))
    assert list(waits(scene.ledger, 0.0)) == ["batch 0 waits for the trainer to close it"]


# Size.


def test_four_times_the_prompts_take_four_times_the_calls() -> None:
    def num_calls(num_batches: int) -> int:
        calls = 0

        def count(_frame: object, event: str, _argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        scene = Scene(num_instances=8).ready(*(f"generator-{i}" for i in range(8)))
        sys.setprofile(count)
        try:
            for batch in range(num_batches):
                scene.batch(batch, num_groups=32)
                scene.advance()
            scene.version(num_batches)
            assert len(scene.advance()) == 32 * (num_batches - 2)
            for batch in range(num_batches):
                scene.report(_outcome(key, num_tokens=batch) for key in _keys(batch, 16))
            assert len(scene.advance(2 * LEASE_S)) == 0
            scene.register()
            assert len(scene.advance()) == 16 * num_batches
        finally:
            sys.setprofile(None)
        return calls

    assert num_calls(48) < 6 * num_calls(12)


def _moves(scene: Scene, name: str) -> list[SampleKey]:
    answer = scene.ledger.answer(name, scene.incarnations[name])
    return [SampleKey.from_proto(sample_id) for sample_id in answer.revoke_unstarted]


def _crowded_and_idle() -> Scene:
    """Twelve samples at generator-0, which runs four at a time, and an instance with four places that came later."""
    scene = Scene(num_instances=1)
    scene.report(complete=True)
    scene.version(0)
    scene.register("generator-0", max_running=4)
    scene.batch(0, num_groups=6, num_samples=2)
    assert len(_samples(scene.advance())) == 12
    scene.heartbeat("generator-0", running=4, waiting=8)
    scene.register("generator-1", max_running=4)
    return scene


def test_heartbeats_are_frequent_while_work_could_move_as_far_as_the_fleet_allows() -> None:
    def interval_s(scene: Scene) -> float:
        return scene.ledger.answer("generator-0", scene.incarnations["generator-0"]).heartbeat_interval_s

    alone = Scene(num_instances=1).ready("generator-0")
    seldom_s = interval_s(alone)
    assert seldom_s == LEASE_S / 5
    alone.batch(0)
    alone.advance()
    assert interval_s(alone) == seldom_s
    scene = Scene(num_instances=2, max_instances=1000).ready("generator-0", "generator-1")
    assert interval_s(scene) == seldom_s
    scene.batch(0)
    scene.advance()
    assert interval_s(scene) == 0.5
    for index in range(2, 150):
        scene.register(f"generator-{index}")
    assert interval_s(scene) == pytest.approx(150 / 250)
    for index in range(150, 1000):
        scene.register(f"generator-{index}")
    assert interval_s(scene) == seldom_s
    still = Scene(num_instances=2, moves="none").ready("generator-0", "generator-1")
    still.batch(0)
    still.advance()
    assert interval_s(still) == seldom_s


def test_an_answer_looks_at_one_instance_however_large_the_fleet_is(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(num_instances=2).ready("generator-0", "generator-1")
    scene.batch(0)
    scene.advance()
    monkeypatch.setattr(scene.ledger.registry, "lives", None)
    assert scene.ledger.answer("generator-0", scene.incarnations["generator-0"]).lease_granted


def test_what_waits_for_a_place_is_asked_for_when_another_instance_has_places() -> None:
    scene = _crowded_and_idle()
    assert scene.advance() == []
    asked = _moves(scene, "generator-0")
    assert len(asked) == 4
    assert _moves(scene, "generator-1") == []
    assert scene.advance() == []
    assert _moves(scene, "generator-0") == asked
    scene.heartbeat("generator-0", running=4, waiting=4, revoked=[GivenBack(id=key.to_proto()) for key in asked])
    assigned = scene.advance()
    assert _samples(assigned) == sorted(asked)
    assert {assignment.incarnation for assignment in assigned} == {scene.incarnations["generator-1"]}
    assert _moves(scene, "generator-0") == []


def test_a_sample_that_has_begun_stays_and_is_not_asked_for_again() -> None:
    scene = _crowded_and_idle()
    scene.advance()
    asked = _moves(scene, "generator-0")
    scene.heartbeat("generator-0", running=4, waiting=8, not_revoked=[key.to_proto() for key in asked])
    assert scene.advance() == []
    again = _moves(scene, "generator-0")
    assert again
    assert not set(again) & set(asked)


def test_moves_cost_a_sample_none_of_its_dispatches() -> None:
    scene = _crowded_and_idle()
    scene.advance()
    (key, *_) = asked = _moves(scene, "generator-0")
    scene.heartbeat("generator-0", running=4, waiting=4, revoked=[GivenBack(id=key.to_proto()) for key in asked])
    scene.advance()
    sample = scene.ledger.samples.batches[BatchKey(PURPOSE_TRAIN, 0)].sample(key)
    assert sample is not None
    assert (sample.dispatch, sample.attempts_used) == (2, 1)


@pytest.mark.parametrize("running", [0, 3])
def test_samples_that_do_not_wait_for_a_place_are_left_alone(running: int) -> None:
    scene = _crowded_and_idle()
    scene.heartbeat("generator-0", running=running, waiting=12 - running)
    scene.advance()
    assert _moves(scene, "generator-0") == []


def test_evaluation_samples_do_not_move() -> None:
    scene = Scene()
    scene.report(complete=True)
    scene.version(0)
    scene.register("generator-0", max_running=4)
    scene.batch(0, num_groups=6, num_samples=2, purpose=PURPOSE_EVALUATION)
    scene.advance()
    scene.heartbeat("generator-0", running=4, waiting=8)
    scene.register("generator-1", max_running=4)
    scene.advance()
    assert _moves(scene, "generator-0") == []


@pytest.mark.parametrize(
    ("max_staleness", "purpose", "counts"),
    [(0, PURPOSE_TRAIN, True), (0, PURPOSE_EVALUATION, False), (1, PURPOSE_TRAIN, False)],
)
def test_plans_mind_the_trainer_where_the_next_batch_waits_for_it(
    max_staleness: int, purpose: int, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    paces = []

    def watched(*arguments: Any, **options: Any) -> Any:
        paces.append(options["trainer_pace"])
        return plan(*arguments, **options)

    monkeypatch.setattr(dispatcher, "plan", watched)
    scene = Scene(max_staleness=max_staleness).ready()
    scene.report(trainer_pace=TrainerPace(token_s=0.25, pass_tokens=64))
    scene.report()
    scene.batch(0, purpose=purpose)
    assert len(_samples(scene.advance())) == 4
    assert paces == [PlannedPace(0.25, 64) if counts else None]
