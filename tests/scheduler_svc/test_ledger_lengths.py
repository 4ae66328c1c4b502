"""What the ledger does with forecasts of lengths, and what it gives the ranker."""

from typing import Any

from scheduler_svc.fleet_view import fleet_view
from scheduler_svc.lengths import PATIENCE_S
from streamrl.identity import PURPOSE_EVALUATION, PURPOSE_TRAIN
from streamrl.planning.forecast import LEVELS
from streamrl.v1.scheduler_pb2 import OUTCOME_ACCEPTED, ClosedBatch, SampleOutcome
from tests.scheduler_svc.test_ledger import Scene


def scene_with_ranker() -> Scene:
    """One instance is live, version 0 announced, and the ranker has learned something."""
    scene = Scene().ready()
    scene.ledger.samples.lengths.uses_ranker = True
    scene.ledger.samples.lengths.ranker_learned()
    scene.advance()
    return scene


def forecasts(**lengths: float) -> list[tuple[str, list[float]]]:
    return [(prompt_id, [length] * len(LEVELS)) for prompt_id, length in lengths.items()]


def accepted(batch: int, group: int, sample: int, **fields: Any) -> SampleOutcome:
    outcome = SampleOutcome(outcome=OUTCOME_ACCEPTED, **fields)
    outcome.id.purpose, outcome.id.batch, outcome.id.group, outcome.id.sample = PURPOSE_TRAIN, batch, group, sample
    return outcome


def test_a_batch_is_planned_with_forecasts_that_come_in_time() -> None:
    scene = scene_with_ranker()
    lengths = scene.ledger.samples.lengths
    scene.batch(0)
    assert scene.advance() == []
    assert [prompt_id for prompt_id, _ in lengths.take_requests(scene.now).to_score] == ["p0", "p1"]
    assert scene.advance() == []
    assert scene.ledger.next_deadline(scene.now) == scene.now + PATIENCE_S
    lengths.take_forecasts(forecasts(p0=10.0, p1=90.0))
    assignments = scene.advance()
    assert [one.group for one in sorted(assignments, key=lambda one: one.priority)] == [1, 0]


def test_a_batch_does_not_wait_long_for_a_ranker_that_is_busy() -> None:
    scene = scene_with_ranker()
    scene.batch(0)
    scene.advance()
    scene.ledger.samples.lengths.take_requests(scene.now)
    assert scene.advance(PATIENCE_S / 2) == []
    assert scene.advance(PATIENCE_S / 2) != []


def test_prompts_that_wait_are_looked_at_again_when_the_ranker_has_learned() -> None:
    scene = scene_with_ranker()
    lengths = scene.ledger.samples.lengths
    scene.batch(5)
    assert len(lengths.take_requests(scene.now).to_score) == 2
    lengths.take_forecasts(forecasts(p0=10.0, p1=90.0))
    lengths.ranker_learned()
    scene.advance()
    assert len(lengths.take_requests(scene.now).to_score) == 2


def test_the_ranker_learns_from_closed_training_batches_and_of_which_answers_were_cut() -> None:
    scene = scene_with_ranker()
    lengths = scene.ledger.samples.lengths
    scene.batch(0)
    scene.batch(0, purpose=PURPOSE_EVALUATION)
    scene.advance()
    lengths.take_requests(scene.now)
    scene.advance(PATIENCE_S)
    outcomes = [
        accepted(0, group, sample, num_tokens=30 + sample, truncated=sample == 1)
        for group in range(2)
        for sample in range(2)
    ]
    scene.report(outcomes)
    assert lengths.num_to_learn == 0
    scene.report(closed=[ClosedBatch(purpose=purpose, batch=0) for purpose in (PURPOSE_TRAIN, PURPOSE_EVALUATION)])
    examples = lengths.take_requests(scene.now).to_learn
    assert [(one.prompt_id, one.lengths, one.cut) for one in examples] == [
        ("p0", (30, 31), (False, True)),
        ("p1", (30, 31), (False, True)),
    ]


def test_recall_is_part_of_the_fleet_when_it_is_known() -> None:
    scene = scene_with_ranker()
    assert not fleet_view(scene.ledger, scene.now).HasField("length_recall")
    for batch in range(20):
        lengths = scene.ledger.samples.lengths
        scene.prompt(batch, 0, 1, prompt_id=f"new-{batch}")
        scene.end(batch, 1)
        scene.version(batch)
        lengths.take_forecasts(forecasts(**{f"new-{batch}": 10.0 + batch}))
        assert scene.advance()
        scene.report([accepted(batch, 0, 0, num_tokens=10 + batch)])
        scene.report(closed=[ClosedBatch(purpose=PURPOSE_TRAIN, batch=batch)])
    recall = fleet_view(scene.ledger, scene.now).length_recall
    assert recall.num_prompts == 20
    assert recall.longest_fifth == recall.longest_tenth == recall.longest_twentieth == 1.0
