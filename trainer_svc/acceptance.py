"""Which rollouts are taken, refused or dropped, and when groups are complete: state without Kafka, gRPC or clock.

The rules:
* A sample has one outcome. The first usable copy of it decides; later ones are counted as duplicates.
* A rollout that failed, or contradicts itself, is rejected: the sample is still wanted, and is generated again.
* A rollout that is too stale, has no reward, or has log-probs of another distribution, is dropped for good.
* Scoring takes its time: a rollout that passes is handed out to be scored, and has an outcome when its reward is there.
  Copies of it that come in between are counted as duplicates.
* A rollout of an earlier attempt counts like any other when the topic held it before this attempt began, and every
  token of it is from a version of this attempt's lineage (trainer_svc/ancestry.py). With a token of a forgotten version
  it is passed over, and its sample is generated again; one that comes later is from an old process, and refused.
* A group is settled when each of its samples has an outcome; only then can its answers be compared.
* With dynamic sampling a group whose answers all have the same reward is dropped when it is settled, and a new prompt
  is asked for in its place, as a further group of the batch, as often as the rules allow.
* A batch can be cut: what has not come is dropped, as dropped.deadline. When enough groups are settled
  (`AcceptanceRules.enough_groups`), the others are dropped whole; after a deadline (`cut`) they are settled without it.
* Whatever comes, in whatever order, of a closed batch expected = trained + dropped.

The thread that feeds it is trainer_svc/collector.py.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf.message import DecodeError

from streamrl.errors import RecordError, StaleAttemptError
from streamrl.identity import PURPOSE_EVALUATION, PURPOSE_TRAIN, BatchKey, SampleKey
from streamrl.staleness import staleness
from streamrl.v1.records_pb2 import ROLLOUT_STATUS_FAILED, ROLLOUT_STATUS_OK, Rollout
from streamrl.v1.sample_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_UNSPECIFIED, LOGPROB_MODE_PROCESSED
from streamrl.v1.scheduler_pb2 import OUTCOME_ACCEPTED, OUTCOME_DROPPED, OUTCOME_REJECTED, SampleOutcome
from trainer_svc.batch_intake import BatchIntake, PromptOfGroup
from trainer_svc.groups import AcceptanceRules, Answer, ScoredSample, SettledGroup, judge_group
from trainer_svc.microbatches import TrainSample
from trainer_svc.reward_input import RewardError
from trainer_svc.rollout_counts import DropReason, RolloutCounts

SharedVersion = Callable[[int], int]
"""The newest weight version that an earlier attempt has in common with this one; -1: none."""


def no_earlier_attempt(_attempt: int) -> int:
    """The shared version of any attempt with the first one."""
    return -1


@dataclass(frozen=True, slots=True)
class Unscored:
    """An answer that wants a reward: `Acceptance.scored` takes it."""

    key: SampleKey
    prompt: Any
    token_ids: Sequence[int]
    truncated: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one rollout."""

    outcome: SampleOutcome | None
    """For the scheduler; None: it needs not know, or not yet."""
    dead_letter: str = ""
    """Why the record could not be handled; empty when it could."""
    unscored: Unscored | None = None
    """To be scored: only then is there an outcome."""


class Acceptance:
    """The open batches, and what has to be remembered of closed ones."""

    def __init__(
        self,
        rules: AcceptanceRules,
        counts: RolloutCounts | None = None,
        shared_version: SharedVersion = no_earlier_attempt,
    ) -> None:
        """
        Args:
            counts: of the batches closed before a checkpoint that this run continues.
        """
        self._rules = rules
        self._shared_version = shared_version
        self._open: dict[BatchKey, BatchIntake] = {}
        self._given_up: dict[BatchKey, set[SampleKey]] = {}
        self._wanted_refills: list[BatchKey] = []
        self._cut: list[SampleOutcome] = []
        self.counts = counts or RolloutCounts()
        """Of closed training batches: those that made the weights."""
        self.refused_attempts = 0
        """Rollouts that processes of earlier attempts wrote after this one had begun."""
        self.forgotten = 0
        """Rollouts of earlier attempts with a token of a version that the run has gone back behind."""
        self.reused = 0
        """Rollouts of earlier attempts that were taken."""

    def open(self, key: BatchKey, prompts: Sequence[PromptOfGroup], samples_per_prompt: int) -> None:
        """Expects a batch's rollouts from now on. Call it before its prompts are written."""
        assert key not in self._open and key not in self._given_up, f"{key} is opened twice"
        self._open[key] = BatchIntake(key, prompts, samples_per_prompt)

    def take_wanted_refills(self) -> list[BatchKey]:
        """Batches that want one more prompt each, in place of one without spread. Whoever takes one brings it by
        `extend`: until then the batch is not complete."""
        wanted, self._wanted_refills = self._wanted_refills, []
        return wanted

    def cut(self, key: BatchKey) -> None:
        """Ends the wait for a batch: what has no outcome is dropped, and its groups are settled without it."""
        batch = self._open[key]
        self._cut_open_groups(batch, "it had not come, and been scored, by the deadline")
        # No prompt is asked for any more; one that is being written is cut when it is there.
        batch.was_cut = True
        batch.missing_refills -= self._wanted_refills.count(key)
        self._wanted_refills = [wanted for wanted in self._wanted_refills if wanted != key]

    def take_cut(self) -> list[SampleOutcome]:
        """Outcomes of samples that were cut off since the last call, for the scheduler."""
        cut, self._cut = self._cut, []
        return cut

    def _cut_open_groups(self, batch: BatchIntake, detail: str) -> None:
        for group in list(batch.open_groups):
            for key in batch.missing(group):
                answer, _ = batch.unscored.pop(key, (None, False))
                if answer is None:
                    batch.given_up.add(key)
                num_tokens = len(answer.token_ids) if answer is not None else 0
                self._cut.append(self._drop(batch, key, "deadline", detail, num_tokens))

    def extend(self, key: BatchKey, prompt: PromptOfGroup) -> list[Verdict]:
        """Expects one more group of an open batch. Call it before the prompt is written.

        Returns:
            What becomes of its samples that an earlier attempt had left.
        """
        batch = self._open[key]
        group = len(batch.prompts)
        batch.prompts = [*batch.prompts, prompt]
        batch.open_groups[group] = batch.samples_per_prompt
        batch.counts = replace(batch.counts, expected=batch.counts.expected + batch.samples_per_prompt)
        batch.missing_refills -= 1
        return [self._offer_earlier(rollout) for rollout in batch.early.pop(group, [])]

    def batch(self, key: BatchKey) -> BatchIntake:
        """An open batch."""
        return self._open[key]

    def open_batches(self) -> list[BatchKey]:
        return list(self._open)

    def closed_batches(self) -> list[BatchKey]:
        """All that were closed in this life of the run."""
        return list(self._given_up)

    def open_outcomes(self) -> list[SampleOutcome]:
        """Every outcome in the open batches, for a scheduler that has forgotten them."""
        return [outcome for batch in self._open.values() for outcome in batch.outcomes.values()]

    def close(self, key: BatchKey) -> BatchIntake:
        """Ends a complete batch; its counts join those of the weights."""
        batch = self._open.pop(key)
        assert batch.complete and batch.counts.balanced, f"{key} is closed before it is complete: {batch.counts}"
        self._given_up[key] = batch.given_up
        if key.purpose == PURPOSE_TRAIN:
            self.counts += batch.counts
        return batch

    def offer(self, rollout: Rollout, *, was_there: bool = False) -> Verdict:
        """Takes one rollout.

        Args:
            was_there: the topic held it when this attempt began.

        Raises:
            StaleAttemptError: it is of a later life of the run: this process must end.
        """
        if rollout.attempt > self._rules.attempt:
            raise StaleAttemptError(
                f"rollouts of attempt {rollout.attempt} arrive, and this trainer is of attempt {self._rules.attempt}: "
                "the run was resumed elsewhere",
                rollout.attempt,
            )
        if was_there:
            return self._offer_earlier(rollout)
        if rollout.attempt < self._rules.attempt:
            self.refused_attempts += 1
            return Verdict(None)
        key = SampleKey.from_proto(rollout.id)
        batch = self._open.get(key.batch_key)
        if batch is None:
            return self._late(key, rollout)
        if not batch.holds(key):
            return Verdict(None, dead_letter=f"sample {key} was never asked for")
        if batch.has(key):
            if rollout.status != ROLLOUT_STATUS_FAILED:
                self._count_again(batch, key)
            return Verdict(None)
        if rollout.status == ROLLOUT_STATUS_FAILED:
            batch.rejected += 1
            return Verdict(_rejection(key, rollout, rollout.error or "generation failed"))
        try:
            check_consistency(rollout)
        except RecordError as error:
            batch.rejected += 1
            return Verdict(_rejection(key, rollout, str(error)), dead_letter=str(error))
        return self._take(batch, key, rollout, is_earlier=False)

    def _offer_earlier(self, rollout: Rollout) -> Verdict:
        """What an earlier attempt has left behind. Whatever cannot be used is passed over in silence: it was told and
        counted in its time, or its batch is behind the checkpoint."""
        # Nothing of this attempt was asked for yet: what bears its number is of another run of this name.
        shared = -1 if rollout.attempt == self._rules.attempt else self._shared_version(rollout.attempt)
        if rollout.status == ROLLOUT_STATUS_FAILED:
            return Verdict(None)
        try:
            check_consistency(rollout)
        except RecordError:
            return Verdict(None)
        if max(span.weight_version for span in rollout.version_spans) > shared:
            self.forgotten += 1
            return Verdict(None)
        key = SampleKey.from_proto(rollout.id)
        batch = self._open.get(key.batch_key)
        if batch is not None and len(batch.prompts) <= key.group and self._rules.max_refills:
            batch.early.setdefault(key.group, []).append(rollout)
            return Verdict(None)
        if batch is None or not batch.holds(key):
            return Verdict(None)
        if batch.has(key):
            self._count_again(batch, key)
            return Verdict(None)
        return self._take(batch, key, rollout, is_earlier=True)

    def scored(self, key: SampleKey, reward: float | RewardError) -> SampleOutcome | None:
        """Takes the reward of an answer that was handed out to be scored, or why it has none. None: it is not waited
        for any more."""
        batch = self._open.get(key.batch_key)
        if batch is None or key not in batch.unscored:
            return None
        answer, is_earlier = batch.unscored.pop(key)
        num_tokens = len(answer.token_ids)
        if isinstance(reward, RewardError):
            # Not a reward of 0; and the same answer would fail again.
            return self._drop(batch, key, "infrastructure", str(reward), num_tokens)
        self.reused += is_earlier
        answer = replace(answer, reward=reward)
        batch.answers[key] = answer
        if key.purpose == PURPOSE_TRAIN:
            batch.samples[key] = _train_sample(answer, batch.prompts[key.group].token_ids)
            batch.arrived.append(batch.samples[key])
        outcome = _outcome(key, OUTCOME_ACCEPTED, num_tokens=num_tokens)
        outcome.truncated = answer.truncated
        return self._resolve(batch, key, outcome)

    def abandon(self, key: SampleKey, reason: str) -> SampleOutcome | None:
        """The scheduler says that a sample will not come. Returns what to confirm; None when there is nothing to."""
        batch = self._open.get(key.batch_key)
        if batch is None or not batch.holds(key) or batch.has(key):
            return None
        batch.given_up.add(key)
        return self._drop(batch, key, "abandoned", reason, num_tokens=0)

    def _late(self, key: SampleKey, rollout: Rollout) -> Verdict:
        """A rollout of a batch that is not open: a copy, or one that was given up and came after all."""
        given_up = self._given_up.get(key.batch_key)
        if given_up is None:
            return Verdict(None, dead_letter=f"{key.batch_key} was never asked for")
        if rollout.status == ROLLOUT_STATUS_FAILED or key.purpose == PURPOSE_EVALUATION:
            return Verdict(None)
        if key in given_up:
            given_up.discard(key)
            self.counts = replace(self.counts, received=self.counts.received + 1)
        else:
            self.counts = replace(self.counts, duplicate=self.counts.duplicate + 1)
        return Verdict(None)

    def _count_again(self, batch: BatchIntake, key: SampleKey) -> None:
        if key in batch.given_up:
            # Here after all, but its group may have been settled without it.
            batch.given_up.discard(key)
            batch.counts = replace(batch.counts, received=batch.counts.received + 1)
        else:
            batch.counts = replace(batch.counts, duplicate=batch.counts.duplicate + 1)

    def _take(self, batch: BatchIntake, key: SampleKey, rollout: Rollout, *, is_earlier: bool) -> Verdict:
        num_tokens = len(rollout.token_ids)
        if batch.key.purpose == PURPOSE_EVALUATION:
            foreign = {span.weight_version for span in rollout.version_spans} - {batch.key.batch}
            if foreign:
                batch.rejected += 1
                return Verdict(_rejection(key, rollout, f"tokens come from version {sorted(foreign)[0]}"))
        batch.counts = replace(
            batch.counts,
            received=batch.counts.received + 1,
            generated_tokens=batch.counts.generated_tokens + num_tokens,
        )
        is_training = batch.key.purpose == PURPOSE_TRAIN
        if is_training and rollout.logprob_mode != LOGPROB_MODE_PROCESSED:
            reason = "log-probs are not those of the sampled distribution"
            return Verdict(self._drop(batch, key, "infrastructure", reason, num_tokens))
        age = 0
        if is_training:
            try:
                age = staleness(key.batch, (span.weight_version for span in rollout.version_spans))
            except ValueError as error:
                return Verdict(self._drop(batch, key, "stale", str(error), num_tokens))
            if age > self._rules.max_staleness:
                reason = f"staleness {age} is above {self._rules.max_staleness}"
                return Verdict(self._drop(batch, key, "stale", reason, num_tokens))
        answer = Answer(
            key=key,
            token_ids=list(rollout.token_ids),
            logprobs=list(rollout.logprobs),
            versions=[(span.weight_version, span.num_tokens) for span in rollout.version_spans],
            reward=math.nan,
            truncated=rollout.finish_reason == FINISH_REASON_LENGTH,
            staleness=age,
            instance=rollout.instance,
            started_s=rollout.timings.started_s,
            finished_s=rollout.timings.finished_s,
        )
        batch.unscored[key] = (answer, is_earlier)
        unscored = Unscored(key, batch.prompts[key.group], answer.token_ids, answer.truncated)
        return Verdict(None, unscored=unscored)

    def _drop(
        self, batch: BatchIntake, key: SampleKey, drop_reason: DropReason, detail: str, num_tokens: int
    ) -> SampleOutcome:
        batch.counts = batch.counts.drop(drop_reason)
        if num_tokens:
            batch.dropped_lengths.append(num_tokens)
        return self._resolve(
            batch, key, _outcome(key, OUTCOME_DROPPED, num_tokens=num_tokens, reason=f"{drop_reason}: {detail}")
        )

    def _resolve(self, batch: BatchIntake, key: SampleKey, outcome: SampleOutcome) -> SampleOutcome:
        batch.outcomes[key] = outcome
        batch.open_groups[key.group] -= 1
        if batch.open_groups[key.group] == 0:
            del batch.open_groups[key.group]
            self._settle(batch, key.group)
        return outcome

    def _settle(self, batch: BatchIntake, group: int) -> None:
        answers = batch.group_answers(group)
        if batch.key.purpose == PURPOSE_EVALUATION:
            batch.counts = replace(batch.counts, trained=batch.counts.trained + len(answers))
            return
        if group in batch.cut_groups:
            for answer in answers:
                batch.counts = batch.counts.drop("filtered")
                batch.dropped_lengths.append(len(answer.token_ids))
            return
        verdict = judge_group(answers, batch.samples_per_prompt, self._rules)
        for drop_reason, dropped in verdict.dropped:
            batch.counts = batch.counts.drop(drop_reason)
            batch.dropped_lengths.append(len(dropped.token_ids))
        batch.equal_groups += verdict.rewards_are_equal
        if verdict.wants_refill and batch.num_refills < self._rules.max_refills and not batch.was_cut:
            batch.num_refills += 1
            batch.missing_refills += 1
            self._wanted_refills.append(batch.key)
        if not any(trained for _, trained in verdict.compared):
            return
        penalties = [self._rules.penalty(answer) for answer, _ in verdict.compared]
        if self._rules.overlong_buffer_tokens:
            batch.overlong_penalties += penalties
        settled = SettledGroup(
            tuple(
                ScoredSample(batch.samples[answer.key], answer.reward - penalty, trained)
                for (answer, trained), penalty in zip(verdict.compared, penalties, strict=True)
            )
        )
        batch.counts = replace(batch.counts, trained=batch.counts.trained + len(settled.trained))
        batch.trained += settled.trained
        batch.groups.append(settled)
        batch.num_useful_groups += 1
        if batch.num_useful_groups == self._rules.enough_groups:
            batch.cut_groups |= batch.open_groups.keys()
            self._cut_open_groups(batch, f"{batch.num_useful_groups} other groups of the batch were whole before")


def check_consistency(rollout: Rollout) -> None:
    """Whether a rollout that says it is well can be used at all.

    Raises:
        RecordError: it contradicts itself.
    """
    num_tokens = len(rollout.token_ids)
    spans = [span.num_tokens for span in rollout.version_spans]
    if rollout.status != ROLLOUT_STATUS_OK:
        raise RecordError(f"status {rollout.status} is unknown")
    if num_tokens == 0:
        raise RecordError("it has no tokens")
    if len(rollout.logprobs) != num_tokens:
        raise RecordError(f"{num_tokens} tokens have {len(rollout.logprobs)} log-probs")
    if sum(spans) != num_tokens or min(spans) < 1:
        raise RecordError(f"{num_tokens} tokens have version spans of {spans} tokens")
    if rollout.id.purpose == PURPOSE_TRAIN and not all(math.isfinite(logprob) for logprob in rollout.logprobs):
        raise RecordError("a log-prob is not finite")
    if rollout.finish_reason == FINISH_REASON_UNSPECIFIED:
        raise RecordError("it does not say why it ended")


def parse_rollout(value: bytes) -> Rollout:
    """A record's value.

    Raises:
        RecordError: it is no rollout.
    """
    try:
        rollout = Rollout.FromString(value)
    except DecodeError as error:
        raise RecordError(f"it is no Rollout: {error}") from error
    if rollout.id.purpose not in (PURPOSE_TRAIN, PURPOSE_EVALUATION):
        raise RecordError(f"purpose {rollout.id.purpose} is unknown")
    return rollout


def _outcome(key: SampleKey, outcome: int, *, num_tokens: int = 0, reason: str = "") -> SampleOutcome:
    return SampleOutcome(id=key.to_proto(), outcome=outcome, num_tokens=num_tokens, reason=reason)  # type: ignore[arg-type]


def _rejection(key: SampleKey, rollout: Rollout, reason: str) -> SampleOutcome:
    """Names the dispatch that it is of: said again or late, it takes the sample from nobody who has it by then."""
    rejection = _outcome(key, OUTCOME_REJECTED, reason=reason)
    rejection.incarnation = rollout.incarnation
    rejection.dispatch = rollout.dispatch
    return rejection


def _train_sample(answer: Answer, prompt_token_ids: Sequence[int]) -> TrainSample:
    own_version = [version == answer.key.batch for version, count in answer.versions for _ in range(count)]
    return TrainSample(
        identity=(answer.key.batch, answer.key.group, answer.key.sample),
        prompt_token_ids=prompt_token_ids,
        answer_token_ids=answer.token_ids,
        behaviour_logprobs=answer.logprobs,
        advantage=0.0,
        own_version=own_version,
    )
