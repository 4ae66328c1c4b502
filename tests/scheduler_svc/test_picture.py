"""What the scheduler makes of progress: which samples it asks for, and what it leaves alone."""

from typing import Any

from scheduler_svc.ledger import Ledger
from scheduler_svc.picture import Wish
from scheduler_svc.settings import SchedulerSection, SchedulerSettings
from streamrl.batch_progress import progress_of, progress_proto
from streamrl.identity import PURPOSE_EVALUATION, PURPOSE_TRAIN, SampleKey
from streamrl.settings import PipelineSection, RunSection, SamplingView, WeightsSection
from streamrl.v1.records_pb2 import Assignment, BatchEnd, Prompt, PromptRecord
from streamrl.v1.sample_pb2 import AnswerPrefix, SamplingSettings, VersionSpan
from streamrl.v1.scheduler_pb2 import (
    OUTCOME_ACCEPTED,
    OUTCOME_REJECTED,
    GivenBack,
    HeartbeatRequest,
    RegisterRequest,
    ReportBatchRequest,
    SampleOutcome,
    StepLatency,
)
from tests.scheduler_svc.dispatching import decide

MAX_TOKENS = 20_000
STEPS = [StepLatency(batch_size=size, latency_s=0.008 + 0.001 * size, num_steps=100) for size in (1, 2, 4, 8)]


class Scene:
    """Eight answers that run on instance "a", and an instance "b" with nothing to do."""

    def __init__(self, *, purpose: Any = PURPOSE_TRAIN, num_groups: int = 8, swap: Any = "boundary", **scheduler: Any):
        settings = SchedulerSettings(
            run=RunSection(id="run"),
            pipeline=PipelineSection(mode="async", max_staleness=1),
            generator=SamplingView(num_instances=1),
            weights=WeightsSection(swap=swap),
            scheduler=SchedulerSection(**scheduler),
        )
        self.ledger = Ledger(settings, incarnation=1, started_at=-100.0)
        self.ledger.report(ReportBatchRequest(run_id="run", attempt=1, complete=True))
        self.ledger.announce(0, 1)
        self.incarnations: dict[str, int] = {}
        self.register("a")
        for group in range(num_groups):
            prompt = Prompt(
                purpose=purpose, batch=0, group=group, num_samples=1, prompt_id=str(group), token_ids=[1],
                sampling=SamplingSettings(temperature=1.0, max_tokens=MAX_TOKENS),
            )  # fmt: skip
            self.ledger.take_record(PromptRecord(attempt=1, prompt=prompt))
        end = BatchEnd(purpose=purpose, batch=0, num_groups=num_groups)
        self.ledger.take_record(PromptRecord(attempt=1, batch_end=end))
        self.keys = [SampleKey(purpose, 0, group, 0) for group in range(num_groups)]
        decide(self.ledger, 1.0)
        self.register("b")
        self.beat("a", dict.fromkeys(self.keys[:8], 1000), running=8, waiting=max(0, num_groups - 8))
        self.beat("b", {})

    def register(self, name: str) -> None:
        request = RegisterRequest(run_id="run", attempt=1, instance=name, max_running=8)
        self.incarnations[name] = self.ledger.register(request, 1.0).incarnation

    def beat(self, name: str, progress: dict[SampleKey, int], **fields: Any) -> None:
        request = HeartbeatRequest(
            run_id="run", attempt=1, instance=name, incarnation=self.incarnations[name], step_latencies=STEPS,
            progress=progress_proto(progress), **{"running": len(progress), **fields},
        )  # fmt: skip
        self.ledger.heartbeat(request, 1.0)

    def look(self) -> list[Wish]:
        picture = self.ledger.picture(1.0)
        if picture is None:
            return []
        for _ in picture.parts():
            pass
        return picture.look()

    def asked(self) -> tuple[list[SampleKey], list[SampleKey]]:
        """(running, waiting) that "a" is asked for."""
        answer = self.ledger.answer("a", self.incarnations["a"])
        running, waiting = (
            [SampleKey.from_proto(one) for one in ids] for ids in (answer.hand_over, answer.revoke_unstarted)
        )
        return running, waiting

    def hand_over(
        self, key: SampleKey, num_tokens: int = 1200, version: int = 0, dispatch: int = 1
    ) -> list[Assignment]:
        prefix = AnswerPrefix(
            token_ids=range(num_tokens), logprobs=[-1.0] * num_tokens,
            version_spans=[VersionSpan(weight_version=version, num_tokens=num_tokens)],
        )  # fmt: skip
        self.beat("a", {}, revoked=[GivenBack(id=key.to_proto(), dispatch=dispatch, prefix=prefix)])
        return [outgoing.assignment for outgoing in decide(self.ledger, 1.0)]


def test_progress_travels_as_it_is() -> None:
    progress = {SampleKey(PURPOSE_TRAIN, 3, 1, 2): 17, SampleKey(PURPOSE_EVALUATION, 3, 1, 0): 5}
    assert progress_of(progress_proto(progress)) == progress


def test_running_answers_of_a_crowded_instance_are_asked_for() -> None:
    scene = Scene()
    wishes = scene.look()
    assert wishes
    assert {(wish.source.name, wish.target.name, wish.begun) for wish in wishes} == {("a", "b", True)}
    assert scene.ledger.ask_for_moves(wishes, 1.0) == len(wishes)
    assert sorted(scene.asked()[0]) == sorted(wish.key for wish in wishes)
    # What is asked for is not asked for once more.
    assert not {wish.key for wish in scene.look()} & set(scene.asked()[0])


def test_what_is_handed_over_goes_on_where_it_was_meant_to() -> None:
    scene = Scene()
    key = scene.look()[0].key
    scene.ledger.ask_for_moves(scene.look(), 1.0)
    (assignment,) = scene.hand_over(key)
    assert assignment.incarnation == scene.incarnations["b"]
    (draw,) = assignment.draws
    assert (draw.dispatch, len(draw.prefix.token_ids)) == (2, 1200)
    sample = scene.ledger.samples.batches[key.batch_key].sample(key)
    assert sample is not None
    assert sample.attempts_used == 1
    assert (scene.ledger.samples.moved, scene.ledger.samples.moved_tokens) == (1, 1200)
    # The same said once more, of a stay that is over, takes it from nobody.
    assert scene.hand_over(key) == []
    assert sample.owner is not None
    assert sample.owner.name == "b"


def test_an_answer_goes_on_under_the_version_of_its_last_token_or_a_later_one() -> None:
    scene = Scene(swap="in_flight")
    scene.ledger.announce(1, 1)
    key = scene.keys[0]
    (assignment,) = scene.hand_over(key, version=1)
    assert assignment.min_weight_version == 1


def test_what_is_there_stays_when_the_next_owner_dies_and_goes_when_it_is_refused() -> None:
    scene = Scene()
    key = scene.keys[0]
    a, b = scene.ledger.registry.lives()
    scene.ledger.ask_for_moves([Wish(key, 1, a, b, begun=True)], 1.0)
    scene.hand_over(key)
    sample = scene.ledger.samples.batches[key.batch_key].sample(key)
    assert sample is not None
    scene.register("b")
    assert any(len(outgoing.assignment.draws[0].prefix.token_ids) == 1200 for outgoing in decide(scene.ledger, 1.0))
    outcome = SampleOutcome(id=key.to_proto(), outcome=OUTCOME_REJECTED)
    scene.ledger.report(ReportBatchRequest(run_id="run", attempt=1, outcomes=[outcome]))
    (outgoing,) = decide(scene.ledger, 1.0)
    assert not outgoing.assignment.draws[0].HasField("prefix")
    outcome.outcome = OUTCOME_ACCEPTED
    scene.ledger.report(ReportBatchRequest(run_id="run", attempt=1, outcomes=[outcome]))
    assert sample.prefix is None


def test_an_assignment_that_no_record_can_carry_begins_anew() -> None:
    scene = Scene()
    (assignment,) = scene.hand_over(scene.keys[0])
    scene.ledger.undeliverable(assignment, "too large")
    (outgoing,) = decide(scene.ledger, 1.0)
    assert not outgoing.assignment.draws[0].HasField("prefix")
    assert outgoing.assignment.draws[0].dispatch == 3


def test_nothing_running_moves_where_the_settings_say_so() -> None:
    assert Scene(moves="none").look() == []
    waiting = Scene(moves="waiting", num_groups=24)
    assert waiting.look()
    assert not any(wish.begun for wish in waiting.look())
    waiting.ledger.ask_for_moves(waiting.look(), 1.0)
    assert waiting.asked()[0] == []
    assert waiting.asked()[1]


def test_evaluations_stay_and_so_does_what_is_on_its_way_to_the_trainer() -> None:
    assert Scene(purpose=PURPOSE_EVALUATION).look() == []
    scene = Scene()
    left = dict.fromkeys(scene.keys[:2], 3000)
    scene.beat("a", left)
    assert {wish.key for wish in scene.look()} <= left.keys()


def test_answers_go_on_under_other_weights_only_with_swaps_in_flight() -> None:
    for swap, expected in (("boundary", False), ("in_flight", True)):
        scene = Scene(swap=swap)
        scene.beat("b", {}, weight_version=1)
        assert bool(scene.look()) == expected
