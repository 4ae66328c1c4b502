"""What a topic holds when an attempt begins is taken before anything else, on both brokers."""

import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from streamrl.identity import PURPOSE_TRAIN, BatchKey, SampleKey
from streamrl.kafka.connection import Connection
from streamrl.kafka.positions import topic_extent
from streamrl.kafka.producer import RecordProducer
from streamrl.kafka.topics import Topics, create_topics
from streamrl.settings import FleetView, KafkaSection
from streamrl.v1.records_pb2 import ROLLOUT_STATUS_OK, Rollout
from streamrl.v1.sample_pb2 import FINISH_REASON_STOP, LOGPROB_MODE_PROCESSED, VersionSpan
from trainer_svc.acceptance import Acceptance
from trainer_svc.collector import Collector
from trainer_svc.groups import AcceptanceRules
from trainer_svc.rewards import RewardScore
from trainer_svc.rollout_intake import RolloutIntake

BATCH = BatchKey(PURPOSE_TRAIN, 4)


class SomePrompt:
    token_ids = (1, 2, 3)


class Topic:
    """Topic `rollouts` of a run of its own."""

    def __init__(self, kafka: KafkaSection) -> None:
        self.connection = Connection(kafka, "test")
        topics = Topics(f"intake-{uuid.uuid4().hex[:8]}")
        create_topics(self.connection, topics, FleetView().max_instances)
        self.name = topics.rollouts

    def write(self, sample: int, attempt: int, version: int = 4) -> None:
        rollout = Rollout(
            attempt=attempt,
            id=SampleKey(*BATCH, 0, sample).to_proto(),
            token_ids=[1, 2],
            logprobs=[-1.0, -1.0],
            logprob_mode=LOGPROB_MODE_PROCESSED,
            version_spans=[VersionSpan(weight_version=version, num_tokens=2)],
            status=ROLLOUT_STATUS_OK,
            finish_reason=FINISH_REASON_STOP,
        )
        with RecordProducer(self.connection) as producer:
            producer.send(self.name, rollout.SerializeToString(), partition=1)

    @property
    def id(self) -> str:
        return topic_extent(self.connection, self.name, 4, timeout_s=30).topic_id


Take = Callable[..., Collector]


@pytest.fixture(params=["embedded_kafka_settings", pytest.param("apache_kafka_settings", marks=pytest.mark.kafka)])
def topic(request: pytest.FixtureRequest) -> Topic:
    return Topic(request.getfixturevalue(request.param))


@pytest.fixture
def take(topic: Topic) -> Iterator[Take]:
    """Begins attempt 2, which has the versions up to 4 in common with attempt 1."""
    running: list[RolloutIntake] = []

    def begin(topic_id: str = "", positions: dict[int, int] | None = None) -> Collector:
        rules = AcceptanceRules(attempt=2, max_staleness=1)
        reward: Future[RewardScore] = Future()
        reward.set_result(RewardScore(1.0, {}))
        collector = Collector(
            Acceptance(rules, shared_version=lambda _earlier: 4),
            score=lambda _prompt, _token_ids, _truncated: reward,
            report=lambda _outcome: None,
            dead_letter=lambda _record, _reason: None,
            refill=lambda _key: None,
        )
        collector.open(BATCH, [SomePrompt()], 4)
        intake = RolloutIntake(
            topic.connection, topic.name, 4, collector, saved_topic_id=topic_id, saved_positions=positions
        )
        running.append(intake)
        intake.start()
        return collector

    yield begin
    for intake in running:
        intake.close()


def test_what_was_there_is_taken_and_what_an_old_process_writes_later_is_refused(topic: Topic, take: Take) -> None:
    topic.write(0, attempt=1)
    topic.write(1, attempt=1, version=5)
    collector = take()
    assert str(collector.progress(BATCH)) == "1 of 4"
    assert collector.reused_and_forgotten() == (1, 1)
    topic.write(2, attempt=1)
    topic.write(1, attempt=2, version=5)
    _until(lambda: collector.refused_attempts() == 1 and str(collector.progress(BATCH)) != "1 of 4")
    # Version 5 of attempt 2 is above batch 4: dropped as what it is, not as forgotten.
    assert collector.reused_and_forgotten() == (1, 1)


def test_positions_are_of_the_topic_that_they_were_taken_from(topic: Topic, take: Take) -> None:
    topic.write(0, attempt=1)
    topic.write(1, attempt=1)
    assert str(take(topic.id, {1: 1}).progress(BATCH)) == "1 of 4"
    assert str(take("another", {1: 1}).progress(BATCH)) == "2 of 4"


def test_the_frontier_is_kept_though_nothing_more_comes(topic: Topic, take: Take) -> None:
    topic.write(0, attempt=1)
    collector = take(topic.id, {1: 1})
    assert collector.resume_positions() == {0: 0, 1: 1, 2: 0, 3: 0}


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.05)
