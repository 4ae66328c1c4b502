"""The books of one batch: its prompts, and where each of its samples stands. Pure state.

What may be done with a sample, and when, is decided in scheduler_svc/ledger.py.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from scheduler_svc.lengths import Foretold
from streamrl.errors import RecordError
from streamrl.identity import PURPOSE_EVALUATION, PURPOSE_TRAIN, BatchKey, SampleKey
from streamrl.v1.records_pb2 import BatchEnd, Prompt
from streamrl.v1.sample_pb2 import AnswerPrefix

if TYPE_CHECKING:
    from scheduler_svc.registry import Life


class SampleState(Enum):
    UNASSIGNED = auto()
    """Waits for its batch to be admitted, or for an instance."""
    ASSIGNED = auto()
    """Given to an instance, and the trainer has not accepted it."""
    ACCEPTED = auto()
    DROPPED = auto()
    """The trainer does not want it any more."""
    ABANDONED = auto()
    """Given up here."""


@dataclass(slots=True, eq=False)
class Sample:
    """One answer."""

    key: SampleKey
    group: "Group"
    state: SampleState = SampleState.UNASSIGNED
    owner: "Life | None" = None
    """While ASSIGNED."""
    dispatch: int = 0
    """How often it was given to an instance."""
    attempts_used: int = 0
    """The same without the times when it was given back unstarted."""
    expected_tokens: int = 0
    """As estimated for its present dispatch."""
    moved_from: "Life | None" = None
    """Whom it was taken from because others had a better place."""
    moves_to: "Life | None" = None
    """Who that is; None: not decided."""
    prefix: AnswerPrefix | None = None
    """What there is of its answer: whoever has it next goes on from there."""

    @property
    def tokens_there(self) -> int:
        return 0 if self.prefix is None else len(self.prefix.token_ids)


@dataclass(slots=True, eq=False)
class Group:
    """One prompt and its samples."""

    prompt: Prompt
    samples: list[Sample] = field(default_factory=list)
    lengths: tuple[float, ...] = ()
    """Forecast of an answer's length as of the last dispatch, at `forecast.LEVELS`."""
    answers: list[tuple[int, bool]] = field(default_factory=list)
    """Tokens of each accepted answer, and whether it was cut."""
    foretold: Foretold | None = None
    """What was expected of them when the first was dispatched."""


@dataclass(slots=True, eq=False)
class Batch:
    """One batch that is not closed."""

    key: BatchKey
    groups: dict[int, Group] = field(default_factory=dict)
    num_groups: int | None = None
    """As its end record says; None: that has not come."""
    unplanned: list[int] = field(default_factory=list)
    """Groups that were not admitted yet, in the order in which they came."""
    admitted: bool = False
    counts: Counter[SampleState] = field(default_factory=Counter)
    outstanding_at: Counter[str] = field(default_factory=Counter)
    """Assigned samples by instance."""
    abandoned: dict[SampleKey, str] = field(default_factory=dict)
    """Those whose loss the trainer has not confirmed, with the reason."""

    @property
    def num_samples(self) -> int:
        return self.counts.total()

    @property
    def whole(self) -> bool:
        """All prompts that its end record counts are here; of a refill, until its own end record comes, it is not."""
        return self.num_groups == len(self.groups)

    def add(self, prompt: Prompt) -> Group | None:
        """Enters a prompt.

        Returns:
            Its group; None: the prompt was there already.

        Raises:
            RecordError: it contradicts the one that came before.
        """
        before = self.groups.get(prompt.group)
        if before is not None:
            if before.prompt != prompt:
                raise RecordError(f"group {prompt.group} of {self.key} came before with another prompt")
            return None
        group = self.groups[prompt.group] = Group(prompt)
        group.samples += (
            Sample(SampleKey(*self.key, prompt.group, index), group) for index in range(prompt.num_samples)
        )
        samples = group.samples
        self.unplanned.append(prompt.group)
        self.counts[SampleState.UNASSIGNED] += len(samples)
        return group

    def end(self, end: BatchEnd) -> None:
        """Notes how many prompts the batch has. A lower count than before is that of a record read again."""
        self.num_groups = max(end.num_groups, self.num_groups or 0)

    def sample(self, key: SampleKey) -> Sample | None:
        group = self.groups.get(key.group)
        return group.samples[key.sample] if group is not None and 0 <= key.sample < len(group.samples) else None

    def move(self, sample: Sample, state: SampleState) -> None:
        """The one place where a sample's state changes."""
        self.counts[sample.state] -= 1
        self.counts[state] += 1
        sample.state = state


def batch_key(record: Prompt | BatchEnd) -> BatchKey:
    """The batch that a record is of.

    Raises:
        RecordError: the record makes no sense.
    """
    if record.purpose not in (PURPOSE_TRAIN, PURPOSE_EVALUATION):
        raise RecordError(f"purpose {record.purpose} is unknown")
    if record.batch < 0:
        raise RecordError(f"batch {record.batch} is negative")
    return BatchKey(record.purpose, record.batch)


def check_prompt(prompt: Prompt) -> None:
    """
    Raises:
        RecordError: no instance could answer this prompt.
    """
    if prompt.group < 0:
        raise RecordError(f"group {prompt.group} is negative")
    if prompt.num_samples < 1:
        raise RecordError(f"num_samples is {prompt.num_samples}: expected 1 or more")
    if not prompt.token_ids:
        raise RecordError("the prompt has no tokens")
    if prompt.sampling.max_tokens < 1:
        raise RecordError(f"sampling.max_tokens is {prompt.sampling.max_tokens}: expected 1 or more")
