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
* Whatever comes, in whatever order, of a closed batch expected = trained + dropped.

The thread that feeds it is trainer_svc/collector.py.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from google.protobuf.message import DecodeError

from streamrl.errors import RecordError, StaleAttemptError
from streamrl.identity import PURPOSE_EVALUATION, PURPOSE_TRAIN, BatchKey, SampleKey
from streamrl.staleness import staleness
from streamrl.v1.records_pb2 import ROLLOUT_STATUS_FAILED, ROLLOUT_STATUS_OK, Rollout
from streamrl.v1.sample_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_UNSPECIFIED, LOGPROB_MODE_PROCESSED
from streamrl.v1.scheduler_pb2 import OUTCOME_ACCEPTED, OUTCOME_DROPPED, OUTCOME_REJECTED, SampleOutcome
from trainer_svc.advantages import TRAINS_TRUNCATED, overlong_penalty, rewards_are_equal
from trainer_svc.microbatches import TrainSample
from trainer_svc.reward_input import RewardError
from trainer_svc.rollout_counts import DropReason, RolloutCounts


class PromptOfGroup(Protocol):
    """What is needed to know of a prompt here; data.py's prompts are more."""

    @property
    def token_ids(self) -> Sequence[int]: ...


SharedVersion = Callable[[int], int]
"""The newest weight version that an earlier attempt has in common with this one; -1: none."""


def no_earlier_attempt(_attempt: int) -> int:
    """The shared version of any attempt with the first one."""
    return -1


@dataclass(frozen=True)
class AcceptanceRules:
    """The settings that decide here."""

    attempt: int
    max_staleness: int
    min_samples: int = 2
    """Of a group: with fewer there is nothing to learn from it."""
    truncated: Literal["train", "mask"] = "train"
    incomplete_groups: Literal["train", "drop"] = "train"
    max_refills: int = 0
    """Of a batch; 0: groups without spread are kept."""
    max_tokens: int = 0
    overlong_buffer_tokens: int = 0
    """0: no answer is too long."""
    overlong_penalty: float = 0.0
    """Most that an answer loses for its length."""

    def penalty(self, answer: "Answer") -> float:
        """What an answer's reward loses for its length before it is learned from."""
        share = overlong_penalty(len(answer.token_ids), self.max_tokens, self.overlong_buffer_tokens)
        return self.overlong_penalty * share


@dataclass(frozen=True, slots=True)
class Answer:
    """An accepted rollout with its reward."""

    key: SampleKey
    token_ids: list[int]
    logprobs: list[float]
    versions: list[tuple[int, int]]
    """Weight version and number of tokens of each stretch."""
    reward: float
    """Of the task."""
    truncated: bool
    staleness: int
    instance: str
    generation_s: float
    """From its first token's step to its last, by the instance's clock."""


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """A sample of a settled group."""

    sample: TrainSample
    """Without its advantage."""
    reward: float
    """That is learned from."""
    trained: bool
    """False: only its reward counts."""


@dataclass(frozen=True, slots=True)
class SettledGroup:
    """A group in which every sample has an outcome, and which takes part in the step."""

    samples: tuple[ScoredSample, ...]
    """In their order."""

    @property
    def index(self) -> int:
        return self.samples[0].sample.identity[1]

    @property
    def rewards(self) -> list[float]:
        return [scored.reward for scored in self.samples]

    @property
    def trained(self) -> list[TrainSample]:
        return [scored.sample for scored in self.samples if scored.trained]


@dataclass(frozen=True, slots=True)
class Intake:
    """What came of a batch since it was last asked for."""

    arrived: Sequence[TrainSample]
    """Of every answer that was accepted, at once."""
    groups: Sequence[SettledGroup]
    """All of whose samples have arrived."""
    complete: bool
    """Nothing more will come."""


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


@dataclass(slots=True)
class BatchIntake:
    """One open batch."""

    key: BatchKey
    prompts: Sequence[PromptOfGroup]
    samples_per_prompt: int
    answers: dict[SampleKey, Answer] = field(default_factory=dict)
    unscored: dict[SampleKey, tuple[Answer, bool]] = field(default_factory=dict)
    """Those whose reward is not there yet (it stands as NaN), and whether they are of an earlier attempt."""
    outcomes: dict[SampleKey, SampleOutcome] = field(default_factory=dict)
    counts: RolloutCounts = field(default_factory=RolloutCounts)
    rejected: int = 0
    """Rollouts that failed and were to come again."""
    given_up: set[SampleKey] = field(default_factory=set)
    """Samples that the scheduler gave up and that have not come after all."""
    dropped_lengths: list[int] = field(default_factory=list)
    """Answer tokens of each rollout that came and was dropped."""
    open_groups: dict[int, int] = field(default_factory=dict)
    """Group to how many of its samples have no outcome yet."""
    overlong_penalties: list[float] = field(default_factory=list)
    """Of the answers of settled groups, where there is a penalty."""
    equal_groups: int = 0
    """Groups whose answers all had the same reward."""
    num_refills: int = 0
    """Prompts that were asked for in place of others, those that are not written yet included."""
    missing_refills: int = 0
    """Those of them that `extend` has not brought yet."""
    samples: dict[SampleKey, TrainSample] = field(default_factory=dict)
    """Of every answer, in a training batch."""
    trained: list[TrainSample] = field(default_factory=list)
    """Those of settled groups that take part in the step."""
    arrived: list[TrainSample] = field(default_factory=list)
    groups: list[SettledGroup] = field(default_factory=list)
    """Settled, with something to train. Both were not taken yet."""
    early: dict[int, list[Rollout]] = field(default_factory=dict)
    """Rollouts that an earlier attempt left of refills that this one has not asked for yet, by group."""

    def __post_init__(self) -> None:
        self.open_groups = dict.fromkeys(range(len(self.prompts)), self.samples_per_prompt)
        self.counts = replace(self.counts, expected=self.num_samples)

    @property
    def num_samples(self) -> int:
        return len(self.prompts) * self.samples_per_prompt

    @property
    def num_resolved(self) -> int:
        """Samples that have an outcome."""
        return len(self.outcomes)

    @property
    def complete(self) -> bool:
        """Every sample has an outcome, and no group is missing."""
        return not self.open_groups and not self.missing_refills

    @property
    def arrived_tokens(self) -> int:
        """Of samples that were not taken yet, prompts included."""
        return sum(sample.num_tokens for sample in self.arrived)

    @property
    def settled_tokens(self) -> int:
        """Of trained samples of groups with spread that were not taken yet, prompts included."""
        return sum(
            sample.num_tokens
            for group in self.groups
            if not rewards_are_equal(group.rewards)
            for sample in group.trained
        )

    @property
    def reward_mean(self) -> float | None:
        """Of all accepted answers; None: there are none."""
        rewards = [answer.reward for answer in self.answers.values()]
        return math.fsum(rewards) / len(rewards) if rewards else None

    @property
    def trained_staleness_max(self) -> int:
        """The largest staleness among samples that take part in the step."""
        trained = (self.answers[SampleKey(self.key.purpose, *sample.identity)] for sample in self.trained)
        return max((answer.staleness for answer in trained), default=0)

    def take(self) -> Intake:
        """What has come; it is not handed out again."""
        taken = Intake(self.arrived, self.groups, self.complete)
        self.arrived, self.groups = [], []
        return taken

    def holds(self, key: SampleKey) -> bool:
        return 0 <= key.group < len(self.prompts) and 0 <= key.sample < self.samples_per_prompt

    def has(self, key: SampleKey) -> bool:
        """Whether a sample has come, or is known not to come."""
        return key in self.outcomes or key in self.unscored

    def group_rewards(self) -> list[list[float]]:
        """Of the answers to each prompt, as the task gives them."""
        return [[answer.reward for answer in self.group_answers(group)] for group in range(len(self.prompts))]

    def group_answers(self, group: int) -> list[Answer]:
        """The answers of a group, by sample."""
        keys = (SampleKey(*self.key, group, sample) for sample in range(self.samples_per_prompt))
        return [self.answers[key] for key in keys if key in self.answers]


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

    def scored(self, key: SampleKey, reward: float | RewardError) -> SampleOutcome:
        """Takes the reward of an answer that was handed out to be scored, or why it has none."""
        batch = self._open[key.batch_key]
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
        return self._resolve(batch, key, _outcome(key, OUTCOME_ACCEPTED, num_tokens=num_tokens))

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
            generation_s=max(0.0, rollout.timings.finished_s - rollout.timings.started_s),
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
        verdict = judge_group(answers, batch.samples_per_prompt, self._rules)
        for drop_reason, dropped in verdict.dropped:
            batch.counts = batch.counts.drop(drop_reason)
            batch.dropped_lengths.append(len(dropped.token_ids))
        batch.equal_groups += verdict.rewards_are_equal
        if verdict.wants_refill and batch.num_refills < self._rules.max_refills:
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


@dataclass(frozen=True, slots=True)
class GroupVerdict:
    """What becomes of the answers of a group in which every sample has an outcome."""

    compared: Sequence[tuple[Answer, bool]]
    """Those whose rewards count, and whether they are trained."""
    dropped: Sequence[tuple[DropReason, Answer]]
    rewards_are_equal: bool = False
    """By the task."""
    wants_refill: bool = False
    """It says nothing about which answer is better, and such groups are replaced."""


def judge_group(answers: Sequence[Answer], num_asked: int, rules: AcceptanceRules) -> GroupVerdict:
    """Applies the policies for incomplete groups, groups without spread, and truncated answers.

    Args:
        answers: those that were accepted.
        num_asked: samples of the group that were asked for.
    """
    filtered: list[tuple[DropReason, Answer]] = [("filtered", answer) for answer in answers]
    incomplete = len(answers) < num_asked
    if len(answers) < rules.min_samples or (incomplete and rules.incomplete_groups == "drop"):
        return GroupVerdict([], filtered)
    equal = len(answers) > 1 and rewards_are_equal([answer.reward for answer in answers])
    if equal and rules.max_refills:
        return GroupVerdict([], filtered, rewards_are_equal=True, wants_refill=True)
    compared = [(answer, not answer.truncated or TRAINS_TRUNCATED[rules.truncated]) for answer in answers]
    dropped: list[tuple[DropReason, Answer]] = [("truncated", answer) for answer, trained in compared if not trained]
    return GroupVerdict(compared, dropped, equal)


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
