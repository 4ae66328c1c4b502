"""What becomes of a group of answers once each of its samples has an outcome: pure functions over rewards.

The policies for incomplete groups, truncated and overlong answers, and groups without spread are here. Which rollouts
become answers is decided in trainer_svc/acceptance.py, what is learned from a settled group in
trainer_svc/batch_training.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from streamrl.identity import SampleKey
from trainer_svc.advantages import TRAINS_TRUNCATED, overlong_penalty, rewards_are_equal
from trainer_svc.microbatches import TrainSample
from trainer_svc.rollout_counts import DropReason


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
    enough_groups: int = 0
    """Of a training batch: when so many have something to train, the others are cut off. 0: all are waited for."""
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
    started_s: float
    """Unix time of its first token's step, by the clock of the instance that sent it."""
    finished_s: float
    """Of its last token's."""

    @property
    def generation_s(self) -> float:
        return max(0.0, self.finished_s - self.started_s)


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
