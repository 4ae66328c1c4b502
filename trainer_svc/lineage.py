"""What is known of all iterations behind the present weights: for the summary, and kept in checkpoints."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from trainer_svc.rollout_counts import RolloutCounts
from trainer_svc.run_log import StepFigures


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """One evaluation of one weight version."""

    weight_version: int
    accuracy: float
    """Mean reward."""
    num_prompts: int
    """Prompts that were answered."""


@dataclass(slots=True)
class Lineage:
    """Grows by one iteration at a time."""

    iteration: int = 0
    """Batches trained: the version of the weights."""
    first_reward: float | None = None
    last_reward: float | None = None
    """Mean reward of the first and the last batch that had answers."""
    staleness_max: int = 0
    """Over all trained samples."""
    first_evaluation: EvaluationResult | None = None
    last_evaluation: EvaluationResult | None = None

    def add_iteration(self, reward: float | None, staleness_max: int) -> None:
        """One more batch was trained."""
        self.iteration += 1
        self.staleness_max = max(self.staleness_max, staleness_max)
        if reward is not None:
            self.last_reward = reward
            if self.first_reward is None:
                self.first_reward = reward

    def add_evaluation(self, result: EvaluationResult) -> None:
        """A version was evaluated; they may end in any order."""
        if self.first_evaluation is None or result.weight_version < self.first_evaluation.weight_version:
            self.first_evaluation = result
        if self.last_evaluation is None or result.weight_version > self.last_evaluation.weight_version:
            self.last_evaluation = result


@dataclass(frozen=True)
class TrainerState:
    """The trainer's part of a checkpoint: with the weights and optimizer beside it, all that is needed to go on."""

    attempt: int
    lineage: Lineage
    cursor: Mapping[str, Any]
    """Of the data, before the first untrained batch was drawn."""
    counts: RolloutCounts
    redispatched: int
    dead_letters: int
    wall_s: float
    wait_s: float
    rollout_positions: Mapping[int, int] = field(default_factory=dict)
    """Partition of `rollouts` to the first offset that holds anything of an untrained batch."""
    rollout_topic_id: str = ""
    """Of the topic that the positions are of."""
    open_evaluations: Sequence[int] = ()
    """Versions up to this one whose evaluation is due and not over."""
    selection: Mapping[str, Any] = field(default_factory=dict)
    """What the trained batches have shown of the prompts."""
    data_digest: str = ""
    """Of the training prompts that the cursor walks over."""
    generator_busy_s: float = 0.0
    generator_available_s: float = 0.0
    """Of all instances: seconds with work, out of these."""
    tracker_run_id: str = ""
    unlogged: Sequence[StepFigures] = ()
    """Figures that the tracker had not taken yet."""

    def to_json(self) -> dict[str, Any]:
        """As state.json has it."""
        return {
            **asdict(self),
            "counts": self.counts.to_json(),
            "open_evaluations": list(self.open_evaluations),
            "unlogged": [asdict(figures) for figures in self.unlogged],
            "rollout_positions": {str(partition): offset for partition, offset in self.rollout_positions.items()},
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`."""
        lineage = dict(values["lineage"])
        for name in ("first_evaluation", "last_evaluation"):
            lineage[name] = EvaluationResult(**lineage[name]) if lineage[name] else None
        return cls(
            **{
                **values,
                "lineage": Lineage(**lineage),
                "counts": RolloutCounts.from_json(values["counts"]),
                "open_evaluations": tuple(values["open_evaluations"]),
                "unlogged": tuple(StepFigures(**figures) for figures in values["unlogged"]),
                "rollout_positions": {int(name): offset for name, offset in values["rollout_positions"].items()},
            }
        )
