"""Work that moves: who should give what to whom, from the progress that is observed. Pure.

Estimates go wrong, and instances that were to end together do not. The rule asks when the fleet will be done, and how
many answers each instance is expected to be late with by then. It then takes, one after the other, the moves that
lower the expected number of late answers: a waiting one to where it can start sooner, a running one to where steps are
shorter, or away from one that must not be held up. What a move costs, the transfer and the tokens that are computed
again while others stand still, is part of the estimate.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamrl.planning.completion import steps_within
from streamrl.planning.forecast import Array
from streamrl.planning.profile import InstanceProfile
from streamrl.planning.standing import Indices, Paces, Prospect, Standing

_MOST_MOVES = 12
"""At a time: what they lead to is better seen than guessed."""
_MOST_TRIES = 6
"""Moves that looked good and, looked at closely, were not."""
_MOST_CANDIDATES = 24
_LEAST_TRANSFERS = 5.0
"""For fewer than so many times the way of an answer nothing moves: it would be there when all is nearly over, and the
rest of its group, and the trainer, would wait for it."""
_LEAST_GAIN = 0.02
"""Expected late answers that a move must spare."""
_LATE = 0.7
"""Expected late answers at the time by which all should be done: then it is as likely as not that all are."""


@dataclass(frozen=True, slots=True)
class Move:
    """An answer that should go elsewhere."""

    answer: int
    """Its index."""
    target: int
    """Index of the instance that should have it."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What may move."""

    transfer_s: float
    """For how long an answer that moves is nowhere."""
    move_running: bool = True
    """Whether answers that have begun may."""
    movable: NDArray[np.bool_] | None = None
    """(n,) Which answers may; None: all."""
    versions: Indices | None = None
    """(N,) The weight version of each instance: an answer that has begun goes on only where it is the same. None: it
    does not matter."""


def choose_moves(standing: Standing, profiles: Sequence[InstanceProfile], rules: Rules) -> list[Move]:
    """The moves that make it likeliest that all is done soon; none if all is well.

    Args:
        profiles: of the N instances.
    """
    if len(profiles) < 2 or not len(standing.instance):
        return []
    allowed = np.ones(len(standing.instance), dtype=bool) if rules.movable is None else rules.movable.copy()
    if not rules.move_running:
        allowed &= ~standing.running
    if not allowed.any():
        return []
    search = _Search(standing, profiles, rules)
    if search.due_s < _LEAST_TRANSFERS * rules.transfer_s:
        return []
    moves: list[Move] = []
    tries = 0
    while len(moves) < _MOST_MOVES and tries < _MOST_TRIES:
        move = search.best_move(allowed)
        if move is None:
            break
        allowed[move.answer] = False
        if search.take(move):
            moves.append(move)
        else:
            tries += 1
    return moves


class _Search:
    """The fleet as it would be after the moves that were taken."""

    def __init__(self, standing: Standing, profiles: Sequence[InstanceProfile], rules: Rules) -> None:
        self._profiles = profiles
        self._kinds = _kinds(profiles)
        self._prospect = Prospect(standing, profiles)
        self._instance = standing.instance.copy()
        self._everyone = np.arange(len(self._instance))
        size = len(profiles)
        there = standing.tokens_there
        self._begun = (there > 0) | standing.running
        self._versions = rules.versions
        self._prefill_s = np.array([profile.prefill_token_s for profile in profiles])
        self._stall_tokens = np.where(there > 0, there + standing.prompt_tokens, 0.0)
        """(n,) tokens for which an instance stands still when an answer comes, beyond what it would cost anywhere."""
        self._pause_s = np.where(self._begun, rules.transfer_s, 0.0)
        self._delay = np.zeros(len(self._instance))
        """(n,) seconds for which an answer that was moved does not go on."""
        self._stalled_s = np.zeros(size)
        """(N,) the same of instances that were given something."""
        self._offset = self._prospect.offsets(self._everyone, self._instance)
        paces = self._prospect.paces(self._everyone, self._instance, self._offset, np.arange(size))
        self.due_s = self._due(paces)
        """When all should be done, from now."""
        self._steps = paces.steps_by(self.due_s)
        self._weigh()

    def _due(self, paces: Paces) -> float:
        """The time at which so many answers are expected to be late."""

        def late(time_s: float) -> float:
            steps = paces.steps_by(time_s)
            return float(self._chance_at(self._everyone, self._instance, self._offset, steps).sum())

        low, high = 0.0, float(paces.times_s[:, -1].max())
        for _ in range(12):
            middle = (low + high) / 2
            if late(middle) > _LATE:
                low = middle
            else:
                high = middle
        return high

    def _chance_at(self, answers: Indices, instance: Indices, offset: Array, steps: Array) -> Array:
        """Of answers, that they are late where they are, given the steps that each instance makes."""
        return self._prospect.chance(answers[:, None], (steps[instance] - offset)[:, None])[:, 0]

    def _weigh(self) -> None:
        """Brings up to date what candidates are compared by."""
        size, instance = len(self._profiles), self._instance
        self._tokens: Array = np.bincount(instance, self._prospect.mean, size).astype(np.float64)
        self._held: Array = np.bincount(instance, self._prospect.held, size).astype(np.float64)
        self._count = np.bincount(instance, minlength=size)
        # With a few per cent fewer steps, or more: how much others suffer from one that comes, and gain when one goes.
        now = (self._steps[instance] - self._offset)[:, None]
        chance = self._prospect.chance(self._everyone[:, None], now * np.array([[1.0, 0.96, 1.04]]))
        self._chance = chance[:, 0]
        self._late, fewer, more = (np.bincount(instance, chance[:, k], size) for k in range(3))
        change = 0.04 * np.maximum(self._steps, 1.0)
        self._loss, self._gain = (fewer - self._late) / change, (self._late - more) / change
        self._rough = self._roughly(self.due_s - self._stalled_s, self._tokens, self._held)

    def _roughly(self, time_s: Array, tokens: Array, held: Array) -> Array:
        """Steps made in a time, by the sums of the work: good for differences. (..., N) each."""
        steps: Array = np.zeros(np.broadcast_shapes(time_s.shape, tokens.shape))
        time_s, tokens, held = (np.broadcast_to(values, steps.shape) for values in (time_s, tokens, held))
        for members, profile in self._kinds:
            steps[..., members] = steps_within(profile, time_s[..., members], tokens[..., members], held[..., members])
        return steps

    def best_move(self, allowed: NDArray[np.bool_]) -> Move | None:
        """The move that seems to spare most late answers; None: none does."""
        candidates = self._candidates(allowed)
        if not len(candidates):
            return None
        prospect, places = self._prospect, self._prospect.places
        source, each = self._instance[candidates], np.arange(len(candidates))
        mean, held = prospect.mean[candidates, None], prospect.held[candidates, None]
        # Where it is, it is late with its own chance, and others make more steps without it.
        time_s = self.due_s - self._stalled_s
        without = self._roughly(time_s, np.maximum(self._tokens - mean, 0.0), np.maximum(self._held - held, 0.0))
        won = np.maximum(without[each, source] - self._rough[source], 0.0)
        spared = self._chance[candidates] + self._gain[source] * won
        # Where it would be, it waits for a place, and others make fewer steps.
        stall_s = self._stall_tokens[candidates, None] * self._prefill_s
        with_it = self._roughly(time_s - stall_s, self._tokens + mean, self._held + held)
        lost = np.maximum(self._rough - with_it, 0.0)
        steps = np.maximum(self._steps - lost, 0.0)
        queue = np.where(self._count >= places, self._tokens / places, 0.0)
        paused = self._pause_s[candidates, None] * steps / max(self.due_s, 1e-9)
        added = prospect.chance(candidates[:, None], steps - queue - paused) + self._loss * lost
        gain = spared[:, None] - added
        gain[each, source] = -np.inf
        if self._versions is not None:
            gain[self._begun[candidates, None] & (self._versions != self._versions[source, None])] = -np.inf
        row, target = divmod(int(np.argmax(gain)), len(self._profiles))
        return Move(int(candidates[row]), target) if gain[row, target] >= _LEAST_GAIN else None

    def take(self, move: Move) -> bool:
        """Looks closely at a move, and takes it if it spares late answers.

        Returns:
            Whether it was taken.
        """
        source = int(self._instance[move.answer])
        both = np.array([source, move.target])
        answers = np.nonzero(np.isin(self._instance, both))[0]
        instance = self._instance[answers].copy()
        instance[answers == move.answer] = move.target
        offset = self._prospect.offsets(answers, instance)
        stall_s = self._stall_tokens[move.answer] * self._prefill_s[move.target]
        stalled_s = self._stalled_s[both] + [0.0, stall_s]
        steps = self._steps.copy()
        steps[both] = self._prospect.paces(answers, instance, offset, both).steps_by(self.due_s - stalled_s)
        pace = steps / max(self.due_s, 1e-9)
        delay = self._delay[answers] + np.where(answers == move.answer, self._pause_s[move.answer], 0.0)
        chance = self._chance_at(answers, instance, offset + delay * pace[instance], steps)
        if chance.sum() > self._chance[answers].sum() - _LEAST_GAIN:
            return False
        self._instance[move.answer] = move.target
        self._offset[answers] = offset + delay * pace[instance]
        self._delay[answers] = delay
        self._stalled_s[both] = stalled_s
        self._steps = steps
        self._weigh()
        return True

    def _candidates(self, allowed: NDArray[np.bool_]) -> Indices:
        """The answers that are likeliest to be late, and companions of theirs: the first and the last to end."""
        worst = int(np.argmax(self._late))
        likely = np.argsort(-np.where(allowed, self._chance, -1.0))[:_MOST_CANDIDATES]
        beside = np.nonzero(allowed & (self._instance == worst))[0]
        beside = beside[np.argsort(self._prospect.mean[beside])]
        half = _MOST_CANDIDATES // 2
        chosen = np.unique(np.concatenate([likely, beside[:half], beside[-half:]]))
        return np.asarray(chosen[allowed[chosen]])


def _kinds(profiles: Sequence[InstanceProfile]) -> list[tuple[Indices, InstanceProfile]]:
    """The instances of each profile."""
    found: dict[int, list[int]] = {}
    for index, profile in enumerate(profiles):
        found.setdefault(id(profile), []).append(index)
    return [(np.array(members), profiles[members[0]]) for members in found.values()]
