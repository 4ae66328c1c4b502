import threading
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from streamrl.errors import StaleAttemptError, UnavailableError
from streamrl.identity import PURPOSE_TRAIN, BatchKey, SampleKey
from streamrl.kafka.reader import Record
from streamrl.v1.records_pb2 import ROLLOUT_STATUS_OK, Rollout
from streamrl.v1.sample_pb2 import FINISH_REASON_STOP, LOGPROB_MODE_PROCESSED, VersionSpan
from streamrl.v1.scheduler_pb2 import OUTCOME_ACCEPTED, OUTCOME_DROPPED, AbandonedSample, SampleOutcome
from trainer_svc.acceptance import Acceptance
from trainer_svc.collector import Collector
from trainer_svc.groups import AcceptanceRules
from trainer_svc.reward_input import RewardError
from trainer_svc.rewards import RewardScore

WAIT_S = 20.0
FIRST, SECOND = BatchKey(PURPOSE_TRAIN, 0), BatchKey(PURPOSE_TRAIN, 1)


def scored(reward: float) -> "Future[RewardScore]":
    future: Future[RewardScore] = Future()
    future.set_result(RewardScore(reward, {}))
    return future


class SomePrompt:
    token_ids = (1, 2, 3)


class Edges:
    """What leaves the collector."""

    def __init__(self, **rules: Any) -> None:
        self.outcomes: list[SampleOutcome] = []
        self.dead_letters: list[tuple[Record, str]] = []
        self.unscored: dict[int, list[Future[RewardScore]]] = {}
        """By first token, of answers whose first token is 100 or more: they are scored when the test says so."""
        self.collector = Collector(
            Acceptance(
                AcceptanceRules(**{"attempt": 1, "max_staleness": 1, **rules}), shared_version=lambda _earlier: 5
            ),
            score=self._score,
            report=self.outcomes.append,
            dead_letter=lambda record, reason: self.dead_letters.append((record, reason)),
            refill=self._refill,
        )
        self.collector.open(FIRST, [SomePrompt(), SomePrompt()], 2)
        self.collector.open(SECOND, [SomePrompt(), SomePrompt()], 2)

    def _refill(self, key: BatchKey) -> None:
        self.collector.extend(key, SomePrompt())

    def _score(self, _prompt: Any, token_ids: Any, _truncated: bool) -> "Future[RewardScore]":
        if token_ids[0] < 100:
            return scored(float(token_ids[0]))
        future: Future[RewardScore] = Future()
        self.unscored.setdefault(token_ids[0], []).append(future)
        return future


def record(value: bytes, offset: int, partition: int = 0) -> Record:
    return Record("rollouts", partition, offset, None, value)


def rollout(key: BatchKey, group: int, sample: int, *, reward: int | None = None, attempt: int = 1) -> bytes:
    return Rollout(
        attempt=attempt,
        id=SampleKey(*key, group, sample).to_proto(),
        token_ids=[sample if reward is None else reward, 9],
        logprobs=[-1.0, -1.0],
        logprob_mode=LOGPROB_MODE_PROCESSED,
        version_spans=[VersionSpan(weight_version=0, num_tokens=2)],
        status=ROLLOUT_STATUS_OK,
        finish_reason=FINISH_REASON_STOP,
    ).SerializeToString()


def test_samples_are_handed_out_once_when_enough_tokens_wait_or_the_batch_is_complete() -> None:
    edges = Edges()
    collector = edges.collector
    collector.on_records([record(rollout(FIRST, 0, 0), 0), record(rollout(FIRST, 0, 1), 1)])
    # A row is three tokens of prompt and two of answer.
    assert collector.take(FIRST, lambda batch: batch.settled_tokens >= 11, timeout_s=0) is None
    assert collector.take(FIRST, None, timeout_s=0) is None
    taken = collector.take(FIRST, lambda batch: batch.settled_tokens == batch.arrived_tokens == 10, timeout_s=0)
    assert taken is not None
    assert ([sample.identity for sample in taken.arrived], taken.complete) == ([(0, 0, 0), (0, 0, 1)], False)
    assert [group.trained for group in taken.groups] == [taken.arrived]
    collector.on_records([record(rollout(FIRST, 1, 1), 2), record(rollout(FIRST, 1, 0), 3)])
    taken = collector.take(FIRST, lambda batch: False, timeout_s=0)
    assert taken is not None
    assert ([sample.identity for sample in taken.arrived], taken.complete) == ([(0, 1, 1), (0, 1, 0)], True)
    assert [sample.identity for sample in taken.groups[0].trained] == [(0, 1, 0), (0, 1, 1)]
    assert collector.close(FIRST).counts.trained == 4
    assert len(edges.outcomes) == 4


def test_samples_of_equal_rewards_are_trained_but_not_waited_for() -> None:
    collector = Edges().collector
    collector.on_records([record(rollout(FIRST, 0, sample, reward=1), sample) for sample in (0, 1)])
    assert collector.take(FIRST, lambda batch: batch.settled_tokens > 0, timeout_s=0) is None
    collector.on_records([record(rollout(FIRST, 1, sample), 2 + sample) for sample in (0, 1)])
    assert collector.take(FIRST, None, timeout_s=0) is not None
    assert len(collector.close(FIRST).trained) == 4


def test_a_batch_that_wants_a_refill_is_not_complete_before_it_has_come() -> None:
    collector = Edges(max_refills=1).collector
    collector.on_records([record(rollout(FIRST, 0, sample, reward=1), sample) for sample in (0, 1)])
    collector.on_records([record(rollout(FIRST, 1, sample), 2 + sample) for sample in (0, 1)])
    assert collector.take(FIRST, None, timeout_s=0) is None
    assert str(collector.progress(FIRST)) == "4 of 6"
    collector.on_records([record(rollout(FIRST, 2, sample, reward=1), 4 + sample) for sample in (0, 1)])
    counts = collector.close(FIRST).counts
    # The bound is reached: the last one is not replaced.
    assert (counts.expected, counts.trained, counts.dropped["filtered"]) == (6, 2, 4)


def test_a_record_that_is_no_rollout_is_put_aside_and_reading_goes_on() -> None:
    edges = Edges()
    edges.collector.on_records([record(b"\xff\xff", 0), record(rollout(FIRST, 0, 0), 1)])
    assert [(letter.offset, bool(reason)) for letter, reason in edges.dead_letters] == [(0, True)]
    assert len(edges.outcomes) == 1


def test_the_frontier_is_the_first_record_of_an_unfinished_batch() -> None:
    collector = Edges().collector
    collector.on_records([record(rollout(FIRST, 0, 0), 5), record(rollout(SECOND, 0, 0), 6)])
    collector.on_records([record(rollout(FIRST, 0, 1), 7), record(rollout(FIRST, 1, 0), 3, partition=1)])
    collector.on_records([record(rollout(FIRST, 1, 1), 4, partition=1)])
    assert collector.resume_positions() == {0: 5, 1: 3}
    collector.close(FIRST)
    assert collector.resume_positions() == {0: 6, 1: 5}


def test_who_waits_is_woken_by_a_given_up_sample_and_by_an_error() -> None:
    edges = Edges()
    collector = edges.collector
    ended: list[bool] = []
    waiting = threading.Thread(target=lambda: ended.append(collector.wait_complete(FIRST, WAIT_S)))
    waiting.start()
    keys = [SampleKey(*FIRST, group, sample) for group in (0, 1) for sample in (0, 1)]
    collector.on_abandoned([AbandonedSample(id=key.to_proto(), reason="gone") for key in keys])
    waiting.join(WAIT_S)
    assert ended == [True]
    assert len(edges.outcomes) == 4

    collector.fail(UnavailableError("the scheduler is away"))
    collector.fail(UnavailableError("and something else"))
    with pytest.raises(UnavailableError, match="scheduler"):
        collector.take(SECOND, None, timeout_s=WAIT_S)
    with pytest.raises(UnavailableError, match="scheduler"):
        collector.check()


def test_rollouts_of_a_later_attempt_end_this_trainer() -> None:
    collector = Edges().collector
    collector.on_records([record(rollout(FIRST, 0, 0, attempt=2), 0)])
    with pytest.raises(StaleAttemptError):
        collector.check()


def test_a_scheduler_that_forgot_is_told_outcomes_of_open_batches_and_closed_ones() -> None:
    collector = Edges().collector
    collector.on_records([record(rollout(FIRST, group, sample), 0) for group in (0, 1) for sample in (0, 1)])
    collector.on_records([record(rollout(SECOND, 0, 0), 9)])
    collector.close(FIRST)
    outcomes, closed = collector.known_outcomes()
    assert ([outcome.id.batch for outcome in outcomes], closed) == ([1], [FIRST])
    assert collector.waiting_rollouts() == 1


def test_a_slow_reward_holds_up_its_own_sample_only() -> None:
    edges = Edges()
    collector = edges.collector
    collector.on_records([record(rollout(FIRST, 0, 0, reward=100), 0), record(rollout(FIRST, 0, 1), 1)])
    collector.on_records([record(rollout(FIRST, 1, sample), 2 + sample) for sample in (0, 1)])
    # A second copy is one, though the first has no outcome yet; and what has come is not given up.
    collector.on_records([record(rollout(FIRST, 0, 0, reward=101), 4)])
    collector.on_abandoned([AbandonedSample(id=SampleKey(*FIRST, 0, 0).to_proto(), reason="gone")])
    taken = collector.take(FIRST, lambda batch: batch.settled_tokens > 0, timeout_s=0)
    assert taken is not None
    assert [group.index for group in taken.groups] == [1]
    assert str(collector.progress(FIRST)) == "3 of 4, 1 wait for their reward"
    waiting = threading.Thread(target=lambda: collector.wait_complete(FIRST, WAIT_S))
    waiting.start()
    edges.unscored[100][0].set_result(RewardScore(0.5, {}))
    waiting.join(WAIT_S)
    batch = collector.close(FIRST)
    assert (batch.counts.trained, batch.counts.duplicate, batch.counts.balanced) == (4, 1, True)
    assert len(edges.outcomes) == 4


def test_a_reward_that_fails_costs_its_sample_and_one_that_is_cancelled_nothing() -> None:
    edges = Edges()
    collector = edges.collector
    collector.on_records([record(rollout(FIRST, 0, sample, reward=100 + sample), sample) for sample in (0, 1)])
    edges.unscored[100][0].set_exception(RewardError("it hung"))
    edges.unscored[101][0].set_exception(CancelledError())
    assert [(outcome.id.sample, outcome.reason) for outcome in edges.outcomes] == [(0, "infrastructure: it hung")]
    assert str(collector.progress(FIRST)) == "1 of 4, 1 wait for their reward"
    collector.check()


def test_a_mistake_of_ours_in_scoring_ends_the_wait_of_who_waits() -> None:
    edges = Edges()
    edges.collector.on_records([record(rollout(FIRST, 0, 0, reward=100), 0)])
    edges.unscored[100][0].set_exception(TypeError("a mistake"))
    with pytest.raises(TypeError, match="a mistake"):
        edges.collector.check()


def test_what_an_earlier_attempt_left_is_scored_before_anything_is_asked_for_again() -> None:
    edges = Edges(attempt=2)
    edges.collector.begin({0: 0}, {0: 1})
    edges.collector.on_records([record(rollout(FIRST, 0, 0, reward=100), 0)])
    ended: list[bool] = []
    waiting = threading.Thread(target=lambda: ended.append(edges.collector.wait_read({0: 1}, WAIT_S)))
    waiting.start()
    edges.unscored[100][0].set_result(RewardScore(1.0, {}))
    waiting.join(WAIT_S)
    assert ended == [True]


def test_a_batch_that_is_cut_is_complete_and_the_scheduler_hears_of_it() -> None:
    edges = Edges()
    collector = edges.collector
    collector.on_records([record(rollout(FIRST, 0, sample), sample) for sample in (0, 1)])
    assert collector.cut(FIRST) == 2
    assert [outcome.outcome for outcome in edges.outcomes] == [OUTCOME_ACCEPTED] * 2 + [OUTCOME_DROPPED] * 2
    taken = collector.take(FIRST, None, timeout_s=0)
    assert taken is not None
    assert taken.complete
    assert collector.cut(FIRST) == 0
    assert collector.close(FIRST).counts.dropped["deadline"] == 2
