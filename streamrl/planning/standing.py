"""How a fleet stands in the middle of its work, and when it will be done. Pure.

Where streamrl/planning/completion.py weighs stretches of a list by sums, here the answers of each instance are followed
along the steps to come: how many of them are expected to run at a step says how long it takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamrl.planning.forecast import Array, LengthForecast
from streamrl.planning.profile import InstanceProfile

Indices = NDArray[np.int64]

_NUM_LEVELS = 48


@dataclass(frozen=True)
class Standing:
    """n answers that have not ended, on N instances."""

    forecast: LengthForecast
    """Of whole lengths."""
    row: Indices
    """(n,) the row of each answer's forecast."""
    instance: Indices
    """(n,) index of the instance that has it."""
    running: NDArray[np.bool_]
    """(n,) whether it has begun there."""
    tokens_there: Array
    """(n,)"""
    prompt_tokens: Array
    """(n,)"""
    rank: Array
    """(n,) the order in which an instance starts those that wait: lower first."""


class Prospect:
    """What is expected of the steps to come, for each answer."""

    def __init__(self, standing: Standing, profiles: Sequence[InstanceProfile]) -> None:
        self.standing = standing
        self.profiles = profiles
        self.places = np.array([profile.max_running for profile in profiles])
        remaining = standing.forecast.remaining(
            standing.tokens_there, standing.prompt_tokens, exceeded_with=0.01, rows=standing.row
        )
        self.mean, self.held = remaining.mean, remaining.held
        self._alive = np.maximum(standing.forecast.chance(standing.row, standing.tokens_there), 1e-6)
        self._furthest = float(remaining.risk.max(initial=1.0)) * 1.05

    def offsets(self, answers: Indices, instance: Indices) -> Array:
        """Steps until answers start, when these are all that instances have: 0 where there is a place."""
        standing = self.standing
        order = np.lexsort((standing.rank[answers], ~standing.running[answers], instance))
        owner, sorted_ = instance[order], answers[order]
        work = np.concatenate([[0.0], np.cumsum(self.mean[sorted_])])
        first = np.searchsorted(owner, owner)
        position = np.arange(len(order)) - first
        places = self.places[owner]
        earlier = np.maximum(np.arange(len(order)) - places, first)
        # All of what started a full batch earlier is done by then, and half of that batch.
        ahead = (work[:-1] + work[earlier]) / 2 - work[first]
        offsets = np.zeros(len(order))
        offsets[order] = np.where(position >= places, ahead / places, 0.0)
        return offsets

    def chance(self, answers: Indices, steps: Array) -> Array:
        """Of answers that run, that they need more steps.

        Args:
            answers: (n, 1) or of the shape of `steps`.
            steps: (n, k); all of below 0.
        """
        standing = self.standing
        rows = np.broadcast_to(standing.row[answers], steps.shape)
        longer = standing.forecast.chance(rows, standing.tokens_there[answers] + np.maximum(steps, 0.0))
        return np.where(steps < 0, 1.0, np.minimum(longer / self._alive[answers], 1.0))

    def paces(self, answers: Indices, instance: Indices, offsets: Array, members: Indices) -> "Paces":
        """How instances get on when these answers are all that they have.

        Args:
            answers: (n,)
            instance: (n,) who has each.
            offsets: (n,) as `offsets` gives them.
            members: the instances that are asked for.
        """
        queued = float(offsets.max(initial=0.0))
        levels = np.linspace(0.0, self._furthest + queued, _NUM_LEVELS)
        since = levels[None, :] - offsets[:, None]
        active = np.where(since >= 0, self.chance(answers[:, None], since), 0.0)
        standing = self.standing
        there = (standing.tokens_there + standing.prompt_tokens)[answers, None]
        batch, held = _sums_by(instance, members, active, active * (there + np.maximum(since, 0.0)))
        step_s = np.empty_like(batch)
        for row, member in enumerate(members.tolist()):
            profile = self.profiles[member]
            step_s[row] = profile.token_latency.of_means(np.minimum(batch[row], profile.max_running))
            step_s[row] += profile.held_token_s * held[row]
        passed = np.cumsum((step_s[:, 1:] + step_s[:, :-1]) / 2 * levels[1], axis=1)
        return Paces(levels, np.concatenate([np.zeros((len(members), 1)), passed], axis=1))


def _sums_by(owner: Indices, members: Indices, *values: Array) -> list[Array]:
    """Of (n, k) rows, the sum over those of each member, (members, k)."""
    order = np.argsort(owner, kind="stable")
    owners, first = np.unique(owner[order], return_index=True)
    position = np.searchsorted(owners, members)
    has_any = (position < len(owners)) & (owners[np.minimum(position, len(owners) - 1)] == members)
    sums = []
    for rows in values:
        of_members = np.zeros((len(members), rows.shape[1]))
        of_members[has_any] = np.add.reduceat(rows[order], first, axis=0)[position[has_any]]
        sums.append(of_members)
    return sums


@dataclass(frozen=True)
class Paces:
    """When instances reach a step."""

    levels: Array
    """(k,) steps from now."""
    times_s: Array
    """(instances, k) when they have made them."""

    def steps_by(self, time_s: float | Array) -> Array:
        """(instances,) steps made by a time, one for all or one each."""
        times = np.broadcast_to(np.asarray(time_s), (len(self.times_s),))[:, None]
        above = np.clip((self.times_s <= times).sum(axis=1), 1, len(self.levels) - 1)
        rows = np.arange(len(above))
        low, high = self.times_s[rows, above - 1], self.times_s[rows, above]
        share = np.clip((times[:, 0] - low) / np.maximum(high - low, 1e-12), 0.0, 1.0)
        return np.asarray(self.levels[above - 1] + share * (self.levels[above] - self.levels[above - 1]))
