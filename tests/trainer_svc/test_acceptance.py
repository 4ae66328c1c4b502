import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import RecordError, StaleAttemptError
from streamrl.identity import PURPOSE_EVALUATION, PURPOSE_TRAIN, BatchKey, SampleKey
from streamrl.v1.records_pb2 import ROLLOUT_STATUS_FAILED, ROLLOUT_STATUS_OK, Rollout
from streamrl.v1.sample_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    LOGPROB_MODE_PROCESSED,
    LOGPROB_MODE_UNSPECIFIED,
    VersionSpan,
)
from streamrl.v1.scheduler_pb2 import OUTCOME_ACCEPTED, OUTCOME_DROPPED, OUTCOME_REJECTED
from trainer_svc.acceptance import Acceptance, Unscored, Verdict, parse_rollout
from trainer_svc.batch_intake import BatchIntake, PromptOfGroup
from trainer_svc.groups import AcceptanceRules
from trainer_svc.reward_input import RewardError

BATCH = BatchKey(PURPOSE_TRAIN, 3)


@dataclass(frozen=True)
class SomePrompt:
    token_ids: tuple[int, ...] = (1, 2)


def rollout(group: int = 0, sample: int = 0, **changes: Any) -> Rollout:
    fields: dict[str, Any] = {
        "attempt": 1,
        "id": SampleKey(*BATCH, group, sample).to_proto(),
        "token_ids": [5 + sample, 7],
        "logprobs": [-0.5, -0.25],
        "logprob_mode": LOGPROB_MODE_PROCESSED,
        "version_spans": [VersionSpan(weight_version=3, num_tokens=2)],
        "status": ROLLOUT_STATUS_OK,
        "finish_reason": FINISH_REASON_STOP,
    }
    return Rollout(**{**fields, **changes})


def failed(group: int = 0, sample: int = 0) -> Rollout:
    return Rollout(
        attempt=1,
        id=SampleKey(*BATCH, group, sample).to_proto(),
        incarnation=17,
        dispatch=2,
        status=ROLLOUT_STATUS_FAILED,
        error="out of memory",
    )


def spans(*versions: int) -> list[VersionSpan]:
    return [VersionSpan(weight_version=version, num_tokens=1) for version in versions]


class ScoredAtOnce(Acceptance):
    """The reward of an answer is whether its first token is odd; whoever offers one gives it at once."""

    def offer(self, rollout: Rollout, *, was_there: bool = False) -> Verdict:
        return self._scored(super().offer(rollout, was_there=was_there))

    def extend(self, key: BatchKey, prompt: PromptOfGroup) -> list[Verdict]:
        return [self._scored(verdict) for verdict in super().extend(key, prompt)]

    def _scored(self, verdict: Verdict) -> Verdict:
        if verdict.unscored is None:
            return verdict
        return Verdict(self.scored(verdict.unscored.key, float(verdict.unscored.token_ids[0] % 2)))


def opened(num_groups: int = 1, samples: int = 2, key: BatchKey = BATCH, **rules: Any) -> Acceptance:
    acceptance = ScoredAtOnce(AcceptanceRules(**{"attempt": 1, "max_staleness": 1, **rules}))
    acceptance.open(key, [SomePrompt()] * num_groups, samples)
    return acceptance


def trained_samples(batch: BatchIntake) -> list[tuple[Any, ...]]:
    return sorted((sample.identity, tuple(sample.answer_token_ids)) for sample in batch.trained)


def test_a_group_is_settled_when_its_last_sample_arrives() -> None:
    acceptance = opened()
    verdict = acceptance.offer(rollout(sample=0))
    assert verdict.outcome is not None and verdict.outcome.outcome == OUTCOME_ACCEPTED
    assert verdict.outcome.num_tokens == 2
    assert acceptance.batch(BATCH).trained == []
    acceptance.offer(rollout(sample=1))
    batch = acceptance.batch(BATCH)
    assert batch.complete
    first, second = sorted(batch.trained, key=lambda sample: sample.identity)
    assert (first.identity, second.identity) == ((3, 0, 0), (3, 0, 1))
    assert first.own_version == [True, True]
    assert first.behaviour_logprobs == [-0.5, -0.25]


def test_a_token_of_an_older_version_is_not_of_the_version_being_trained() -> None:
    acceptance = opened()
    acceptance.offer(rollout(sample=0, version_spans=spans(2, 3)))
    acceptance.offer(rollout(sample=1))
    first = min(acceptance.batch(BATCH).trained, key=lambda sample: sample.identity)
    assert first.own_version == [False, True]
    assert acceptance.batch(BATCH).answers[SampleKey(*BATCH, 0, 0)].staleness == 1


@pytest.mark.parametrize("versions", [(1, 3), (4, 4)], ids=["older than the bound", "newer than the batch"])
def test_staleness_above_the_bound_or_below_zero_is_dropped_and_counted(versions: tuple[int, int]) -> None:
    acceptance = opened()
    verdict = acceptance.offer(rollout(sample=0, version_spans=spans(*versions)))
    assert verdict.outcome is not None and verdict.outcome.outcome == OUTCOME_DROPPED
    acceptance.offer(rollout(sample=1))
    batch = acceptance.close(BATCH)
    assert batch.counts.dropped["stale"] == 1
    # One sample alone has nothing to be compared with.
    assert batch.counts.dropped["filtered"] == 1
    assert batch.counts.trained == 0


def test_the_second_copy_of_a_sample_is_counted_and_changes_nothing() -> None:
    acceptance = opened()
    acceptance.offer(rollout(sample=0))
    verdict = acceptance.offer(rollout(sample=0, token_ids=[100, 7]))
    assert verdict.outcome is None
    acceptance.offer(rollout(sample=1))
    assert [sample[1] for sample in trained_samples(acceptance.batch(BATCH))] == [(5, 7), (6, 7)]
    acceptance.close(BATCH)
    acceptance.offer(rollout(sample=1))
    assert acceptance.counts.duplicate == 2
    assert acceptance.counts.received == 2


def test_a_failed_rollout_is_rejected_and_its_sample_may_still_come() -> None:
    acceptance = opened()
    verdict = acceptance.offer(failed())
    assert verdict.outcome is not None
    assert (verdict.outcome.outcome, verdict.outcome.reason) == (OUTCOME_REJECTED, "out of memory")
    assert (verdict.outcome.incarnation, verdict.outcome.dispatch) == (17, 2)
    acceptance.offer(rollout(sample=0))
    acceptance.offer(rollout(sample=1))
    # A failure that comes after the answer takes nothing back.
    assert acceptance.offer(failed()).outcome is None
    assert acceptance.close(BATCH).counts.trained == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [], "logprobs": [], "version_spans": []},
        {"logprobs": [-0.5]},
        {"logprobs": [-0.5, float("nan")]},
        {"version_spans": [VersionSpan(weight_version=3, num_tokens=1)]},
        {"finish_reason": 0},
        {"status": 0},
    ],
)
def test_a_rollout_that_contradicts_itself_is_a_dead_letter_and_rejected(changes: dict[str, Any]) -> None:
    acceptance = opened()
    verdict = acceptance.offer(rollout(**changes))
    assert verdict.dead_letter
    assert verdict.outcome is not None and verdict.outcome.outcome == OUTCOME_REJECTED
    assert acceptance.batch(BATCH).num_resolved == 0


def test_logprobs_of_another_distribution_are_never_trained() -> None:
    acceptance = opened()
    acceptance.offer(rollout(sample=0, logprob_mode=LOGPROB_MODE_UNSPECIFIED))
    assert acceptance.batch(BATCH).counts.dropped["infrastructure"] == 1


def test_an_earlier_attempt_is_refused_and_counted_and_a_later_one_ends_this_process() -> None:
    acceptance = opened(attempt=2)
    assert acceptance.offer(rollout(attempt=1)).outcome is None
    assert acceptance.refused_attempts == 1
    with pytest.raises(StaleAttemptError, match="resumed elsewhere"):
        acceptance.offer(rollout(attempt=3))


@pytest.mark.parametrize("key", [SampleKey(*BATCH, 5, 0), SampleKey(*BATCH, 0, 9), SampleKey(PURPOSE_TRAIN, 8, 0, 0)])
def test_a_sample_that_was_never_asked_for_is_a_dead_letter(key: SampleKey) -> None:
    assert opened().offer(rollout(id=key.to_proto())).dead_letter


def test_a_given_up_sample_leaves_its_group_trained_without_it_and_may_arrive_too_late() -> None:
    acceptance = opened(samples=3)
    acceptance.offer(rollout(sample=0))
    acceptance.offer(rollout(sample=1))
    outcome = acceptance.abandon(SampleKey(*BATCH, 0, 2), "dispatched 3 times")
    assert outcome is not None and outcome.outcome == OUTCOME_DROPPED
    assert acceptance.abandon(SampleKey(*BATCH, 0, 2), "dispatched 3 times") is None
    batch = acceptance.close(BATCH)
    assert (batch.counts.trained, batch.counts.dropped["abandoned"], batch.counts.received) == (2, 1, 2)
    acceptance.offer(rollout(sample=2))
    acceptance.offer(rollout(sample=2))
    assert (acceptance.counts.received, acceptance.counts.duplicate) == (3, 1)
    assert acceptance.counts.balanced


def test_an_incomplete_group_can_be_dropped_as_a_whole() -> None:
    acceptance = opened(samples=3, incomplete_groups="drop")
    acceptance.offer(rollout(sample=0))
    acceptance.abandon(SampleKey(*BATCH, 0, 1), "gone")
    acceptance.offer(rollout(sample=2))
    counts = acceptance.close(BATCH).counts
    assert (counts.trained, counts.dropped["filtered"], counts.dropped["abandoned"]) == (0, 2, 1)


def test_the_scheduler_is_told_which_answers_were_cut() -> None:
    acceptance = opened(samples=2)
    whole = acceptance.offer(rollout(sample=0))
    cut = acceptance.offer(rollout(sample=1, finish_reason=FINISH_REASON_LENGTH))
    assert whole.outcome is not None and not whole.outcome.truncated
    assert cut.outcome is not None and cut.outcome.truncated


def test_masked_truncated_answers_are_dropped_but_count_in_the_mean_of_their_group() -> None:
    acceptance = opened(samples=3, truncated="mask")
    acceptance.offer(rollout(sample=0))
    acceptance.offer(rollout(sample=1, finish_reason=FINISH_REASON_LENGTH))
    acceptance.offer(rollout(sample=2))
    batch = acceptance.close(BATCH)
    assert batch.counts.dropped["truncated"] == 1
    assert [(scored.reward, scored.trained) for scored in batch.groups[0].samples] == [(1, True), (0, False), (1, True)]


def test_equal_rewards_count_as_trained() -> None:
    acceptance = opened()
    acceptance.offer(rollout(sample=0))
    acceptance.offer(rollout(sample=1, token_ids=[5, 9]))
    batch = acceptance.close(BATCH)
    assert batch.groups[0].rewards == [1.0, 1.0]
    assert (batch.counts.trained, batch.equal_groups) == (2, 1)


def test_evaluation_takes_exactly_its_version_and_is_counted_apart() -> None:
    key = BatchKey(PURPOSE_EVALUATION, 3)
    acceptance = opened(num_groups=1, samples=1, key=key)
    mine = SampleKey(*key, 0, 0).to_proto()
    mixed = acceptance.offer(rollout(id=mine, version_spans=spans(3, 4)))
    assert mixed.outcome is not None and mixed.outcome.outcome == OUTCOME_REJECTED
    acceptance.offer(rollout(id=mine))
    assert [answer.reward for answer in acceptance.close(key).answers.values()] == [1.0]
    acceptance.offer(rollout(id=mine))
    assert acceptance.counts.expected == acceptance.counts.duplicate == acceptance.counts.received == 0


def test_bytes_that_are_no_rollout_are_a_record_error() -> None:
    with pytest.raises(RecordError):
        parse_rollout(b"\xff\xff\xff")
    with pytest.raises(RecordError, match="purpose"):
        parse_rollout(b"")


arrivals = st.sampled_from(["good", "good", "copy", "failed", "stale", "raw", "abandoned", "truncated"])


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), arrivals), max_size=40),
    st.sampled_from(["train", "drop"]),
    st.sampled_from(["train", "mask"]),
)
def test_whatever_comes_every_sample_is_trained_or_dropped_for_a_reason(
    events: list[tuple[int, int, str]], incomplete_groups: str, truncated: str
) -> None:
    acceptance = opened(num_groups=3, samples=3, incomplete_groups=incomplete_groups, truncated=truncated)
    finish = [(group, sample, "good") for group in range(3) for sample in range(3)]
    for group, sample, event in [*events, *finish]:
        match event:
            case "abandoned":
                acceptance.abandon(SampleKey(*BATCH, group, sample), "gone")
            case "failed":
                acceptance.offer(failed(group, sample))
            case "stale":
                acceptance.offer(rollout(group, sample, version_spans=spans(0, 3)))
            case "raw":
                acceptance.offer(rollout(group, sample, logprob_mode=LOGPROB_MODE_UNSPECIFIED))
            case "truncated":
                acceptance.offer(rollout(group, sample, finish_reason=FINISH_REASON_LENGTH))
            case _:
                acceptance.offer(rollout(group, sample))
        batch = acceptance.batch(BATCH)
        assert len({sample.identity for sample in batch.trained}) == len(batch.trained)
    batch = acceptance.close(BATCH)
    assert batch.counts.balanced
    assert batch.counts.trained == len(batch.trained) <= batch.counts.received
    assert acceptance.counts == batch.counts


@given(st.randoms(use_true_random=False), st.integers(1, 3))
def test_any_order_and_any_number_of_copies_train_the_same_samples(order: random.Random, copies: int) -> None:
    def train(rollouts: list[Rollout]) -> list[tuple[Any, ...]]:
        acceptance = opened(num_groups=3, samples=3)
        for one in rollouts:
            acceptance.offer(one)
        return trained_samples(acceptance.close(BATCH))

    rollouts = [
        rollout(group, sample, version_spans=spans(0, 3) if (group, sample) == (1, 1) else spans(2, 3))
        for group in range(3)
        for sample in range(3)
    ]
    shuffled = rollouts * copies
    order.shuffle(shuffled)
    assert train(shuffled) == train(rollouts)


def equal_rewards(group: int, key: BatchKey = BATCH) -> list[Rollout]:
    return [rollout(group, sample, token_ids=[5, 9]) for sample in (0, 1)]


def test_a_group_without_spread_is_replaced_by_another_prompt_until_the_bound() -> None:
    acceptance = opened(max_refills=2)
    for group in range(3):
        for one in equal_rewards(group):
            acceptance.offer(one)
        wanted = acceptance.take_wanted_refills()
        assert wanted == ([BATCH] if group < 2 else [])
        assert acceptance.batch(BATCH).complete == (group == 2)
        for key in wanted:
            acceptance.extend(key, SomePrompt((8, 9)))
    batch = acceptance.close(BATCH)
    assert (batch.counts.expected, batch.counts.trained, batch.counts.dropped["filtered"]) == (6, 0, 6)
    assert (batch.num_refills, batch.equal_groups, len(batch.prompts)) == (2, 3, 3)


def test_a_group_with_spread_is_kept_under_dynamic_sampling() -> None:
    acceptance = opened(max_refills=2)
    for sample in (0, 1):
        acceptance.offer(rollout(sample=sample))
    assert acceptance.take_wanted_refills() == []
    assert acceptance.close(BATCH).counts.trained == 2


def test_what_an_earlier_attempt_left_of_a_refill_is_taken_when_the_refill_is_asked_for() -> None:
    acceptance = ScoredAtOnce(AcceptanceRules(attempt=2, max_staleness=1, max_refills=1), shared_version=lambda _: 3)
    acceptance.open(BATCH, [SomePrompt()], 2)
    for one in (rollout(1, 0), rollout(1, 0), *equal_rewards(0)):
        acceptance.offer(one, was_there=True)
    assert acceptance.take_wanted_refills() == [BATCH]
    outcomes = [verdict.outcome for verdict in acceptance.extend(BATCH, SomePrompt())]
    assert [(outcome.id.group, outcome.id.sample) for outcome in outcomes if outcome is not None] == [(1, 0)]
    acceptance.offer(rollout(1, 1, attempt=2))
    batch = acceptance.close(BATCH)
    assert (batch.counts.trained, batch.counts.duplicate, acceptance.reused) == (2, 1, 3)


def test_one_answer_is_enough_where_answers_are_not_compared_with_each_other() -> None:
    acceptance = opened(min_samples=1)
    acceptance.offer(rollout(sample=0))
    acceptance.abandon(SampleKey(*BATCH, 0, 1), "gone")
    assert acceptance.close(BATCH).counts.trained == 1


def test_long_answers_lose_reward_that_is_learned_from_and_none_that_is_reported() -> None:
    acceptance = opened(max_tokens=3, overlong_buffer_tokens=2, overlong_penalty=0.5)
    acceptance.offer(rollout(sample=0))
    acceptance.offer(rollout(sample=1, token_ids=[6], logprobs=[-1.0], version_spans=spans(3)))
    batch = acceptance.close(BATCH)
    assert batch.groups[0].rewards == [0.75, 0.0]
    assert (batch.reward_mean, batch.overlong_penalties) == (0.5, [0.25, 0.0])


@given(st.randoms(use_true_random=False))
def test_rewards_may_come_in_any_order_between_any_rollouts(order: random.Random) -> None:
    acceptance = Acceptance(AcceptanceRules(attempt=1, max_staleness=1))
    acceptance.open(BATCH, [SomePrompt()] * 3, 3)
    rollouts = [rollout(group, sample) for group in range(3) for sample in range(3)] * 2
    order.shuffle(rollouts)
    waiting: list[Unscored] = []
    while rollouts or waiting:
        if rollouts and (not waiting or order.random() < 0.5):
            verdict = acceptance.offer(rollouts.pop())
            waiting += [verdict.unscored] if verdict.unscored is not None else []
        else:
            unscored = waiting.pop(order.randrange(len(waiting)))
            failed = unscored.key[2:] == (1, 1)
            outcome = acceptance.scored(unscored.key, RewardError("x") if failed else float(unscored.token_ids[0]))
            assert outcome.outcome == (OUTCOME_DROPPED if failed else OUTCOME_ACCEPTED)
    counts = acceptance.close(BATCH).counts
    assert (counts.trained, counts.duplicate, counts.dropped["infrastructure"]) == (8, 9, 1)


def test_when_enough_groups_are_whole_the_others_are_cut_off_whole() -> None:
    acceptance = opened(num_groups=4, enough_groups=2)
    acceptance.offer(rollout(3, 0))
    for group in (0, 2):
        assert not acceptance.batch(BATCH).complete
        for sample in (0, 1):
            acceptance.offer(rollout(group, sample))
    batch = acceptance.batch(BATCH)
    assert batch.complete
    cut = acceptance.take_cut()
    assert sorted(SampleKey.from_proto(outcome.id)[2:] for outcome in cut) == [(1, 0), (1, 1), (3, 1)]
    assert {outcome.outcome for outcome in cut} == {OUTCOME_DROPPED}
    assert acceptance.take_cut() == []
    assert batch.counts.dropped["deadline"] == 3
    assert batch.counts.dropped["filtered"] == 1
    assert [identity for identity, _ in trained_samples(batch)] == [(3, 0, 0), (3, 0, 1), (3, 2, 0), (3, 2, 1)]
    # One that comes after all is received, once.
    acceptance.close(BATCH)
    for _ in range(2):
        assert acceptance.offer(rollout(1, 0)).outcome is None
    assert (acceptance.counts.received, acceptance.counts.duplicate) == (6, 1)
    assert acceptance.counts.expected == acceptance.counts.trained + sum(acceptance.counts.dropped.values())


def test_at_the_deadline_groups_are_settled_with_what_has_come() -> None:
    acceptance = opened(num_groups=3, samples=3)
    for sample in range(3):
        acceptance.offer(rollout(0, sample))
    for sample in range(2):
        acceptance.offer(rollout(1, sample))
    acceptance.cut(BATCH)
    batch = acceptance.batch(BATCH)
    assert batch.complete
    assert len(acceptance.take_cut()) == 4
    assert [identity for identity, _ in trained_samples(batch)] == [
        (3, 0, 0),
        (3, 0, 1),
        (3, 0, 2),
        (3, 1, 0),
        (3, 1, 1),
    ]
    assert (batch.counts.dropped["deadline"], batch.counts.balanced) == (4, True)
    acceptance.cut(BATCH)
    assert acceptance.take_cut() == []


def test_an_answer_whose_reward_comes_after_the_deadline_is_not_trained() -> None:
    acceptance = Acceptance(AcceptanceRules(attempt=1, max_staleness=1))
    acceptance.open(BATCH, [SomePrompt()], 2)
    verdict = acceptance.offer(rollout(0, 0))
    assert verdict.unscored is not None
    acceptance.cut(BATCH)
    assert acceptance.scored(verdict.unscored.key, 1.0) is None
    batch = acceptance.close(BATCH)
    assert acceptance.scored(verdict.unscored.key, 1.0) is None
    assert (batch.counts.dropped["deadline"], batch.counts.received, batch.dropped_lengths) == (2, 1, [2])


def test_a_batch_that_was_cut_asks_for_no_further_prompts() -> None:
    acceptance = opened(num_groups=2, max_refills=5)
    acceptance.offer(rollout(0, 0, token_ids=[5, 7]))
    acceptance.offer(rollout(0, 1, token_ids=[5, 7]))
    acceptance.cut(BATCH)
    assert acceptance.take_wanted_refills() == []
    assert acceptance.batch(BATCH).complete
    refilled = opened(num_groups=2, max_refills=5)
    refilled.offer(rollout(0, 0, token_ids=[5, 7]))
    refilled.offer(rollout(0, 1, token_ids=[5, 7]))
    assert refilled.take_wanted_refills() == [BATCH]
    refilled.cut(BATCH)
    assert not refilled.batch(BATCH).complete
    refilled.extend(BATCH, SomePrompt())
    refilled.cut(BATCH)
    assert refilled.batch(BATCH).complete
