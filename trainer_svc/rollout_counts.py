"""What became of the samples that were asked for: the counters of the summary, and the rule that they keep."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, get_args

DropReason = Literal["stale", "abandoned", "truncated", "deadline", "infrastructure", "filtered"]
"""Why a sample is not trained.

stale: a token older than max_staleness allows, or newer than the batch. abandoned: the scheduler gave it up after
`scheduler.max_dispatches`. truncated: cut at max_tokens under `trainer.truncated = "mask"`. deadline: it took longer
than it was given. infrastructure: its log-probs are not those of the sampled distribution, or a reward function failed
on it. filtered: nothing is wrong with it, but its group cannot be trained without the samples that are missing.
"""

DROP_REASONS: tuple[DropReason, ...] = get_args(DropReason)


def _no_drops() -> dict[DropReason, int]:
    return dict.fromkeys(DROP_REASONS, 0)


@dataclass(frozen=True, slots=True)
class RolloutCounts:
    """Counts of samples of one purpose; of one batch, or of all batches that made the weights."""

    expected: int = 0
    """Asked for."""
    received: int = 0
    """Came, each identity once; also those that were then dropped."""
    trained: int = 0
    """Took part in a step, those of groups with equal rewards included."""
    duplicate: int = 0
    """Second and later copies."""
    dropped: dict[DropReason, int] = field(default_factory=_no_drops)
    generated_tokens: int = 0
    """Answer tokens of the received ones."""

    @property
    def balanced(self) -> bool:
        """Every sample that was asked for was trained or dropped for a reason."""
        return self.expected == self.trained + sum(self.dropped.values())

    def __add__(self, other: "RolloutCounts") -> "RolloutCounts":
        return RolloutCounts(
            expected=self.expected + other.expected,
            received=self.received + other.received,
            trained=self.trained + other.trained,
            duplicate=self.duplicate + other.duplicate,
            dropped={reason: self.dropped[reason] + other.dropped[reason] for reason in DROP_REASONS},
            generated_tokens=self.generated_tokens + other.generated_tokens,
        )

    def drop(self, reason: DropReason, count: int = 1) -> Self:
        """These counts with `count` more dropped samples."""
        return replace(self, dropped={**self.dropped, reason: self.dropped[reason] + count})

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """The inverse of `to_json`."""
        return cls(**{**values, "dropped": {**_no_drops(), **values["dropped"]}})
