"""The books of one open batch: its prompts, what has come of each sample, and what training has not taken yet.

What is entered here, and why, is decided in trainer_svc/acceptance.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from streamrl.identity import BatchKey, SampleKey
from streamrl.v1.records_pb2 import Rollout
from streamrl.v1.scheduler_pb2 import SampleOutcome
from trainer_svc.advantages import rewards_are_equal
from trainer_svc.groups import Answer, SettledGroup
from trainer_svc.microbatches import TrainSample
from trainer_svc.rollout_counts import RolloutCounts


class PromptOfGroup(Protocol):
    """What is needed to know of a prompt here; data.py's prompts are more."""

    @property
    def token_ids(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class Intake:
    """What came of a batch since it was last asked for."""

    arrived: Sequence[TrainSample]
    """Of every answer that was accepted, at once."""
    groups: Sequence[SettledGroup]
    """All of whose samples have arrived."""
    complete: bool
    """Nothing more will come."""


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
    was_cut: bool = False
    """Whether its deadline is over."""
    num_useful_groups: int = 0
    """All of these so far."""
    cut_groups: set[int] = field(default_factory=set)
    """Groups that are not waited for any more, since there are enough others."""
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

    def missing(self, group: int) -> list[SampleKey]:
        """The samples of a group that have no outcome."""
        keys = (SampleKey(*self.key, group, sample) for sample in range(self.samples_per_prompt))
        return [key for key in keys if key not in self.outcomes]

    def group_rewards(self) -> list[list[float]]:
        """Of the answers to each prompt, as the task gives them."""
        return [[answer.reward for answer in self.group_answers(group)] for group in range(len(self.prompts))]

    def group_answers(self, group: int) -> list[Answer]:
        """The answers of a group, by sample."""
        keys = (SampleKey(*self.key, group, sample) for sample in range(self.samples_per_prompt))
        return [self.answers[key] for key in keys if key in self.answers]
