from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from streamrl.identity import PURPOSE_EVALUATION, BatchKey, SampleKey
from streamrl.kafka.reader import Record
from streamrl.v1.records_pb2 import ROLLOUT_STATUS_OK, Rollout
from streamrl.v1.sample_pb2 import FINISH_REASON_STOP, VersionSpan
from streamrl.v1.scheduler_pb2 import AbandonedSample
from trainer_svc.acceptance import Acceptance
from trainer_svc.collector import Collector
from trainer_svc.evaluation import Evaluations
from trainer_svc.groups import AcceptanceRules
from trainer_svc.lineage import EvaluationResult
from trainer_svc.rewards import RewardScore


def scored(reward: float) -> "Future[RewardScore]":
    future: Future[RewardScore] = Future()
    future.set_result(RewardScore(reward, {}))
    return future


class SomePrompt:
    token_ids = (1, 2)


class Writer:
    """Opens the batch as the real one does, and writes nothing."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

        self.written: list[BatchKey] = []

    def open_evaluation(self, weight_version: int, prompts: Any) -> BatchKey:
        key = BatchKey(PURPOSE_EVALUATION, weight_version)
        self._collector.open(key, prompts, 1)
        return key

    def write(self, key: BatchKey) -> None:
        self.written.append(key)


def evaluations(every: int = 2, first_version: int = 0, left: Sequence[int] = (0,)) -> tuple[Evaluations, Collector]:
    collector = Collector(
        Acceptance(AcceptanceRules(attempt=1, max_staleness=1)),
        score=lambda _prompt, token_ids, _truncated: scored(float(token_ids[0] == 1)),
        report=lambda _outcome: None,
        dead_letter=lambda _record, _reason: None,
        refill=lambda _key: None,
    )
    writer: Any = Writer(collector)
    return (
        Evaluations(
            [SomePrompt()] * 3,  # type: ignore[list-item]
            every=every,
            num_iterations=5,
            writer=writer,
            collector=collector,
            first_version=first_version,
            left=left,
        ),
        collector,
    )


def answer(version: int, group: int, first_token: int) -> Record:
    rollout = Rollout(
        attempt=1,
        id=SampleKey(PURPOSE_EVALUATION, version, group, 0).to_proto(),
        token_ids=[first_token],
        logprobs=[0.0],
        version_spans=[VersionSpan(weight_version=version, num_tokens=1)],
        status=ROLLOUT_STATUS_OK,
        finish_reason=FINISH_REASON_STOP,
    )
    return Record("rollouts", 0, 0, None, rollout.SerializeToString())


def test_the_first_the_last_and_every_second_version_are_due() -> None:
    due, _ = evaluations(every=2)
    assert [version for version in range(6) if due.is_due(version)] == [0, 2, 4, 5]
    only_ends, _ = evaluations(every=0)
    assert [version for version in range(6) if only_ends.is_due(version)] == [0, 5]


def test_an_attempt_repeats_no_evaluation_that_is_over_and_ends_those_that_are_not() -> None:
    running, collector = evaluations(first_version=4, left=[2])
    assert [version for version in range(6) if running.is_due(version)] == [2, 5]
    assert running.left(4) == [2]
    running.open(2)
    assert not running.is_due(2)
    assert running.left(4) == [2]
    assert running.left(5) == [2, 5]
    collector.on_records([answer(2, group, 1) for group in range(3)])
    assert len(running.take_finished()) == 1
    assert running.left(4) == []
    gone, _ = evaluations(first_version=4, left=[2])
    gone.give_up(2)
    assert gone.left(4) == []


def test_a_prompt_without_an_answer_is_left_out_and_not_counted_as_wrong() -> None:
    running, collector = evaluations()
    running.begin(2)
    collector.on_records([answer(2, 0, 1), answer(2, 1, 0)])
    assert running.take_finished() == []
    assert str(running.progress()) == "2 of 3"
    missing = SampleKey(PURPOSE_EVALUATION, 2, 2, 0).to_proto()
    collector.on_abandoned([AbandonedSample(id=missing, reason="gone")])
    ((result, batch, figures),) = running.take_finished()
    assert result == EvaluationResult(weight_version=2, accuracy=0.5, num_prompts=2)
    assert (figures["eval/accuracy"], figures["eval/answers"]) == (0.5, 2)
    assert batch.key == BatchKey(PURPOSE_EVALUATION, 2)
    assert running.under_way() == []


def test_an_evaluation_without_any_answer_has_no_accuracy() -> None:
    running, collector = evaluations()
    running.begin(2)
    missing = [SampleKey(PURPOSE_EVALUATION, 2, group, 0).to_proto() for group in range(3)]
    collector.on_abandoned([AbandonedSample(id=identity, reason="gone") for identity in missing])
    ((result, _, figures),) = running.take_finished()
    assert result.num_prompts == 0
    assert figures == {}


def test_two_evaluations_may_end_in_any_order() -> None:
    running, collector = evaluations()
    running.begin(2)
    running.begin(4)
    collector.on_records([answer(4, group, 1) for group in range(3)])
    ((result, _, _),) = running.take_finished()
    assert result.weight_version == 4
    assert running.under_way() == [BatchKey(PURPOSE_EVALUATION, 2)]
