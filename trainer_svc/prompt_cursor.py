"""Which prompts come next: a shuffled walk over the data set that can be continued exactly.

Pure: the state is a value, and drawing returns the next one. So a checkpoint keeps the state that belongs to the last
trained batch although later batches have been drawn already. Reading the prompts is data.py's work.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

_REFILL_STREAM = 1
"""Of random numbers: apart from the epochs' orders, which are drawn with the seed and the epoch alone."""


@dataclass(frozen=True)
class CursorState:
    """Where the walk stands.

    Every epoch has an order of its own, derived from seed and epoch alone. `position` counts how far that order has
    been looked through; `deferred` holds prompts that were looked at and put off, since they were in the batch already
    (which can happen only where a batch reaches over the end of an epoch). They come first in the next draw. Prompts
    that a draw may not have are passed over, and come again in the next epoch.
    """

    seed: int
    num_prompts: int
    epoch: int = 0
    position: int = 0
    deferred: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_prompts < 1:
            raise ValueError(f"a prompt cursor needs at least one prompt, got {self.num_prompts}")
        if self.seed < 0 or self.epoch < 0 or not 0 <= self.position <= self.num_prompts:
            raise ValueError(f"not a state of a prompt cursor over {self.num_prompts} prompts: {self}")
        if any(not 0 <= index < self.num_prompts for index in self.deferred):
            raise ValueError(f"a prompt cursor over {self.num_prompts} prompts cannot put off {self.deferred}")

    def to_json(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {
            "seed": self.seed,
            "num_prompts": self.num_prompts,
            "epoch": self.epoch,
            "position": self.position,
            "deferred": list(self.deferred),
        }

    @classmethod
    def from_json(cls, values: dict[str, Any], num_prompts: int) -> "CursorState":
        """The state a checkpoint holds, for a data set of so many prompts.

        Raises:
            ValueError: it was saved over another number of prompts, or is damaged.
        """
        expected = {"seed", "num_prompts", "epoch", "position", "deferred"}
        if set(values) != expected:
            raise ValueError(f"prompt cursor: expected the keys {sorted(expected)}, got {sorted(values)}")
        if values["num_prompts"] != num_prompts:
            raise ValueError(
                f"the data set has {num_prompts} prompts and the checkpoint was made with {values['num_prompts']}: "
                "resume with the same data, or start a new run from the checkpoint's model"
            )
        return cls(**{**values, "deferred": tuple(values["deferred"])})


def draw(state: CursorState, count: int, allowed: npt.NDArray[np.bool_] | None = None) -> tuple[list[int], CursorState]:
    """The next prompts, and the state after them.

    Every epoch covers each prompt exactly once, whatever the sizes of the draws. No prompt comes twice in one draw
    unless the draw is larger than the data set; then each comes equally often, give or take one. Where not all prompts
    are allowed, the same holds of those that are in all draws.

    Args:
        count: how many, 1 or more; larger than the data set is allowed.
        allowed: for each prompt whether it may be drawn now; None: all may.

    Returns:
        Indices into the data set, in order; and the state to draw from next.
    """
    if count < 1:
        raise ValueError(f"expected to draw at least one prompt, got {count}")
    num_allowed = state.num_prompts if allowed is None else int(np.count_nonzero(allowed))
    if num_allowed < 1:
        raise ValueError("expected at least one prompt that may be drawn")
    drawn: list[int] = []
    in_this_draw: set[int] = set()
    while len(drawn) < count:
        index, state = _next_not_in(state, in_this_draw, allowed)
        drawn.append(index)
        in_this_draw.add(index)
        if len(in_this_draw) == num_allowed:
            in_this_draw.clear()
    return drawn, state


def refill_order(
    state: CursorState, batch: int, drawn: Sequence[int], allowed: npt.NDArray[np.bool_] | None = None
) -> list[int]:
    """The prompts that come in place of those of a batch that teach nothing, in order: all others that are allowed, in
    an order of the batch's own.

    They do not come out of the walk: what is asked for again depends on the answers, and what batches hold must not,
    so that an attempt which takes the run up draws what the topics hold.

    Args:
        state: any of the run's.
        drawn: indices of the batch's prompts; where there are no others, these come again.
        allowed: as for `draw`.
    """
    order = np.random.default_rng([state.seed, _REFILL_STREAM, batch]).permutation(state.num_prompts)
    if allowed is not None:
        order = order[allowed[order]]
    others = order[~np.isin(order, drawn)]
    return [int(index) for index in (others if len(others) else order)]


def _next_not_in(
    state: CursorState, avoided: set[int], allowed: npt.NDArray[np.bool_] | None
) -> tuple[int, CursorState]:
    """The first prompt left in the epoch that is allowed and not avoided; else one of the next epoch, where there is
    one: not all that are allowed are avoided."""
    while True:
        for place, index in enumerate(state.deferred):
            if index not in avoided and (allowed is None or allowed[index]):
                return index, replace(state, deferred=state.deferred[:place] + state.deferred[place + 1 :])
        order = _order(state.seed, state.epoch, state.num_prompts)
        put_off: list[int] = []
        for position in range(state.position, state.num_prompts):
            index = int(order[position])
            if allowed is not None and not allowed[index]:
                continue
            if index not in avoided:
                return index, replace(state, position=position + 1, deferred=(*state.deferred, *put_off))
            put_off.append(index)
        state = CursorState(state.seed, state.num_prompts, state.epoch + 1, deferred=(*state.deferred, *put_off))


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, num_prompts: int) -> npt.NDArray[np.int64]:
    """The order of one epoch: a permutation of 0 to num_prompts - 1."""
    return np.random.default_rng([seed, epoch]).permutation(num_prompts)
