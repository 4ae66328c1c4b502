"""Which prompts a batch may be drawn from: those that still teach something, and are as hard as is due. Pure.

What batch b shows counts from batch b + max_staleness + 1 on: those before have been drawn by then. So the prompts that
a batch may have depend on its index and on the batches that were closed in time, and on nothing else; an attempt that
takes the run up from a checkpoint draws what the topics hold.

* By pass rate: a prompt of which nearly all answers were right, or nearly none, is left out for a while or for good.
* By level: of prompts that are ordered by difficulty only one level is drawn from, and the next one when enough answers
  to it are right. Never back.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

Rest = tuple[int, int | None]
"""The first batch that a prompt is left out of, and the first that it may be in again; None: never."""


@dataclass(frozen=True)
class SelectionRules:
    """The settings that decide here."""

    delay: int
    """Batches from the one that shows something to the first that heeds it: max_staleness + 1."""
    right_reward: float = 1.0
    """Least reward of a right answer."""
    easy_pass_rate: float | None = None
    """Least share of right answers with which a prompt is left out; None: none is."""
    hard_pass_rate: float | None = None
    """Most share of right answers with which a prompt is left out; None: none is."""
    rest_iterations: int = 0
    """For so many batches; 0: for good."""
    level_accuracy: float = 1.0
    """Least share of right answers with which the next level begins."""
    level_iterations: int = 1
    """Batches at a level that it is taken over."""


@dataclass(frozen=True)
class SelectionState:
    """What the closed batches have shown."""

    rests: Mapping[int, tuple[Rest, ...]]
    """By prompt, in order; those that are over are forgotten."""
    level_starts: tuple[int, ...] = ()
    """The first batch of level 1, of level 2 and so on, as far as they are known."""
    accuracies: tuple[float, ...] = ()
    """Shares of right answers in the last batches of the newest level."""

    def to_json(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {
            "rests": {str(index): [list(rest) for rest in rests] for index, rests in self.rests.items()},
            "level_starts": list(self.level_starts),
            "accuracies": list(self.accuracies),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "SelectionState":
        """The inverse of `to_json`; of no values what a run begins with."""
        if not values:
            return NOTHING_SHOWN
        rests = {int(index): tuple((first, end) for first, end in rests) for index, rests in values["rests"].items()}
        return cls(rests, tuple(values["level_starts"]), tuple(values["accuracies"]))

    def level(self, batch: int) -> int:
        """That a batch is drawn from."""
        return sum(start <= batch for start in self.level_starts)

    def num_resting(self, batch: int) -> int:
        """Prompts that are left out of a batch, if enough others are there."""
        return sum(_rests(rests, batch) for rests in self.rests.values())


NOTHING_SHOWN = SelectionState({})


class Selection:
    """The state with the rules, as batches go by."""

    def __init__(
        self,
        rules: SelectionRules,
        state: SelectionState = NOTHING_SHOWN,
        levels: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """
        Args:
            levels: of each prompt, from 0 on without gaps; None: there are none.
        """
        self._rules = rules
        self._levels = levels
        self._num_levels = 1 if levels is None else int(levels.max()) + 1
        self.state = state

    def allowed(self, batch: int, count: int, num_prompts: int) -> npt.NDArray[np.bool_] | None:
        """As `allowed_prompts`."""
        return allowed_prompts(self.state, batch, count, num_prompts, self._levels)

    def observe(self, batch: int, groups: Sequence[tuple[int, Sequence[float]]]) -> None:
        """As the function of this name."""
        before, self.state = self.state, observe(self.state, self._rules, batch, groups, self._num_levels)
        if len(self.state.level_starts) > len(before.level_starts):
            level, start = len(self.state.level_starts), self.state.level_starts[-1]
            logger.info("level %d of %d begins with batch %d", level, self._num_levels - 1, start)

    def figures(self, batch: int) -> dict[str, float]:
        """Of what a batch was drawn from."""
        figures = {}
        if self._rules.easy_pass_rate is not None or self._rules.hard_pass_rate is not None:
            figures["data/left_out"] = float(self.state.num_resting(batch))
        if self._levels is not None:
            figures["data/level"] = float(self.state.level(batch))
        return figures


def allowed_prompts(
    state: SelectionState, batch: int, count: int, num_prompts: int, levels: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.bool_] | None:
    """The prompts that a batch may be drawn from.

    Prompts whose rates would leave them out are drawn all the same when fewer than `count` others are left.

    Args:
        count: prompts of the batch.
        levels: of each prompt; None: there are none.

    Returns:
        For each prompt whether it is allowed, at least one of them; None: all are.
    """
    if levels is None and not state.rests:
        return None
    at_level = np.ones(num_prompts, dtype=np.bool_) if levels is None else levels == state.level(batch)
    allowed = at_level.copy()
    allowed[[index for index, rests in state.rests.items() if _rests(rests, batch)]] = False
    return allowed if np.count_nonzero(allowed) >= count else at_level


def observe(
    state: SelectionState,
    rules: SelectionRules,
    batch: int,
    groups: Sequence[tuple[int, Sequence[float]]],
    num_levels: int = 1,
) -> SelectionState:
    """What is known after a batch was closed; batches are closed in their order.

    Args:
        groups: each a prompt and the rewards of all its answers.
    """
    groups = [(index, rewards) for index, rewards in groups if rewards]
    state = _with_rests(state, rules, batch, groups)
    return _with_level(state, rules, batch, groups, num_levels)


def pass_rate(rewards: Sequence[float], right_reward: float) -> float:
    """The share of right answers; a rounding error below `right_reward` is right."""
    return sum(reward >= right_reward - 1e-9 for reward in rewards) / len(rewards)


def _with_rests(
    state: SelectionState, rules: SelectionRules, batch: int, groups: Sequence[tuple[int, Sequence[float]]]
) -> SelectionState:
    rests = {}
    for index, known in state.rests.items():
        # Nothing before the next batch will be drawn again.
        if left := tuple(rest for rest in known if rest[1] is None or rest[1] > batch + 1):
            rests[index] = left
    first = batch + rules.delay
    rest: Rest = (first, first + rules.rest_iterations if rules.rest_iterations else None)
    for index, rewards in groups:
        rate = pass_rate(rewards, rules.right_reward)
        is_easy = rules.easy_pass_rate is not None and rate >= rules.easy_pass_rate
        is_hard = rules.hard_pass_rate is not None and rate <= rules.hard_pass_rate
        if (is_easy or is_hard) and not _rests(rests.get(index, ()), first):
            rests[index] = (*rests.get(index, ()), rest)
    return replace(state, rests=rests)


def _with_level(
    state: SelectionState,
    rules: SelectionRules,
    batch: int,
    groups: Sequence[tuple[int, Sequence[float]]],
    num_levels: int,
) -> SelectionState:
    newest = len(state.level_starts)
    # Batches that were drawn before the newest level began say nothing of it.
    if newest == num_levels - 1 or state.level(batch) < newest or not groups:
        return state
    accuracy = math.fsum(pass_rate(rewards, rules.right_reward) for _, rewards in groups) / len(groups)
    accuracies = (*state.accuracies, accuracy)[-rules.level_iterations :]
    enough = len(accuracies) == rules.level_iterations
    if enough and math.fsum(accuracies) / len(accuracies) >= rules.level_accuracy:
        return replace(state, level_starts=(*state.level_starts, batch + rules.delay), accuracies=())
    return replace(state, accuracies=accuracies)


def _rests(rests: Sequence[Rest], batch: int) -> bool:
    return any(first <= batch and (end is None or batch < end) for first, end in rests)
