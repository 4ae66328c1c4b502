"""Dealing a batch so that its iteration is over soon, too: the trainer works while answers come. Pure.

In mode sync the next batch waits for the trainer, and the trainer begins with a group when all its answers are there.
When all instances end together, each with long answers at last, most of its work is left for afterwards. So here plans
are compared by when the trainer is done with them as well, and bettered: a group goes to another instance, or two are
exchanged, as long as that helps.

What instances and the trainer do is followed step by step, for some lengths that forecasts hold possible. What is left
out: answers of one group that differ in length, and work that moves.
"""

import heapq
import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from streamrl.planning.forecast import LEVELS, Array
from streamrl.planning.profile import InstanceProfile

MOST_ANSWERS = 4096
"""Of larger batches no plan is compared: it takes a millisecond for a thousand answers each time."""
_NUM_CASES = 4
"""Sets of lengths that plans are compared by, where lengths are not certain."""
_TRIES = 64
"""Changes that are tried from each plan on, times the sets of lengths."""
_GENERATION_WEIGHT = 0.3
"""Of the time at which the last answer is there, beside that of the iteration: engines are free from then on."""


@dataclass(frozen=True, slots=True)
class TrainerPace:
    """How the trainer gets on with answers while others are to come."""

    token_s: float
    """Seconds that it works on a token, prompts included."""
    pass_tokens: int
    """For so many it begins a pass."""


@dataclass(frozen=True, slots=True)
class Part:
    """Answers of one group that one instance draws."""

    group: int
    num_samples: int
    prompt_tokens: int
    lengths: tuple[float, ...]
    """Of one answer, at `forecast.LEVELS`; or one entry: it is known."""


@dataclass(frozen=True, slots=True)
class Ends:
    """When a batch that begins at 0 is over."""

    generation_s: float
    """The last answer is there."""
    iteration_s: float
    """The trainer is done with it."""


Share = list[int]
"""The indices of an instance's parts, ascending."""


class IterationPlanner:
    """Compares plans for one batch, and betters them."""

    def __init__(
        self, parts: Sequence[Part], profiles: Sequence[InstanceProfile], busy_s: Sequence[float], pace: TrainerPace
    ) -> None:
        """
        Args:
            parts: in the order in which instances start them.
            profiles: of the instances, two or more.
            busy_s: for how long each has other work.
        """
        self._parts = parts
        self._instances = [_Instance(profile, busy) for profile, busy in zip(profiles, busy_s, strict=True)]
        self._cases = _cases(parts)
        """(cases, parts) lengths."""
        num_samples, prompt_tokens = (
            np.array([getattr(part, name) for part in parts]) for name in ("num_samples", "prompt_tokens")
        )
        self._train_s = (pace.token_s * num_samples * (self._cases + prompt_tokens)).tolist()
        self._pass_s = pace.token_s * pace.pass_tokens

    def best_from(self, plans: Iterable[Sequence[Share]]) -> list[Share]:
        """The best plan that is found from some others on, by changes that each make it better.

        Args:
            plans: one or more; each a share for every instance, each part once.
        """
        return min((self._bettered(plan) for plan in plans), key=lambda found: found[0])[1]

    def ends(self, plan: Sequence[Share]) -> Ends:
        """What is expected of a plan."""
        found = self._ends([self._settled_s(*one) for one in enumerate(plan)], plan)
        return Ends(*(sum(times) / len(times) for times in zip(*found, strict=True)))

    def _bettered(self, plan: Sequence[Share]) -> tuple[float, list[Share]]:
        """With what it costs."""
        shares = list(plan)
        settled_s = [self._settled_s(*one) for one in enumerate(shares)]
        cost_s = self._cost_s(settled_s, shares)
        chance = random.Random(0)
        for _ in range(_TRIES // len(self._cases)):
            first, second = chance.sample(range(len(shares)), 2)
            if not shares[first]:
                continue
            tried, tried_s = list(shares), list(settled_s)
            tried[first], tried[second] = _changed(shares[first], shares[second], chance)
            for instance in (first, second):
                tried_s[instance] = self._settled_s(instance, tried[instance])
            if (tried_cost_s := self._cost_s(tried_s, tried)) < cost_s:
                shares, settled_s, cost_s = tried, tried_s, tried_cost_s
        return cost_s, shares

    def _settled_s(self, instance: int, share: Share) -> list[list[float]]:
        """For each case when each part's answers are there."""
        parts = [self._parts[index] for index in share]
        return [self._instances[instance].settled_s(parts, row) for row in self._cases[:, share].tolist()]

    def _cost_s(self, settled_s: Sequence[Sequence[Sequence[float]]], plan: Sequence[Share]) -> float:
        return sum(
            iteration_s + _GENERATION_WEIGHT * generation_s for generation_s, iteration_s in self._ends(settled_s, plan)
        )

    def _ends(self, settled_s: Sequence[Sequence[Sequence[float]]], plan: Sequence[Share]) -> list[tuple[float, float]]:
        """For each case."""
        indices = list(itertools.chain.from_iterable(plan))
        found = []
        for case, train_s in enumerate(self._train_s):
            times_s = itertools.chain.from_iterable(of_instance[case] for of_instance in settled_s)
            groups: dict[int, tuple[float, float]] = {}
            for index, time_s in zip(indices, times_s, strict=True):
                group = self._parts[index].group
                last_s, work_s = groups.get(group, (0.0, 0.0))
                groups[group] = max(last_s, time_s), work_s + train_s[index]
            found.append(_trained_s(sorted(groups.values()), self._pass_s))
        return found


class _Instance:
    """Draws answers in a given order."""

    def __init__(self, profile: InstanceProfile, busy_s: float) -> None:
        self._profile = profile
        self._busy_s = busy_s
        self._step_s = [0.0, *map(profile.token_latency, range(1, profile.max_running + 1))]

    def settled_s(self, parts: Sequence[Part], lengths: Sequence[float]) -> list[float]:
        """When the last answer of each part is there."""
        profile, step_s, places = self._profile, self._step_s, self._places(parts, lengths)
        settled_s = [0.0] * len(parts)
        running: list[tuple[float, int, int]] = []
        """By the step in which they end: the index of the part, and how many answers."""
        size, steps, held, time_s = 0, 0.0, 0.0, self._busy_s
        coming = 0
        left = parts[0].num_samples if parts else 0
        while coming < len(parts) or running:
            while coming < len(parts) and size < places:
                part = parts[coming]
                begun = min(places - size, left)
                if left == part.num_samples:
                    time_s += part.prompt_tokens * profile.prefill_token_s
                heapq.heappush(running, (steps + lengths[coming], coming, begun))
                size, left, held = size + begun, left - begun, held + begun * part.prompt_tokens
                if not left:
                    coming += 1
                    left = parts[coming].num_samples if coming < len(parts) else 0
            more = running[0][0] - steps
            time_s += more * (step_s[size] + profile.held_token_s * (held + size * more / 2))
            steps, held = steps + more, held + size * more
            while running and running[0][0] <= steps:
                _, ended, count = heapq.heappop(running)
                size, held = size - count, held - count * (parts[ended].prompt_tokens + lengths[ended])
                settled_s[ended] = time_s
        return settled_s

    def _places(self, parts: Sequence[Part], lengths: Sequence[float]) -> int:
        """How many answers run at once: as it is set, or as many as the cache holds of them on average."""
        profile = self._profile
        if profile.kv_cache_tokens == float("inf"):
            return profile.max_running
        tokens = held = 0.0
        for part, length in zip(parts, lengths, strict=True):
            tokens += part.num_samples * length
            held += part.num_samples * length * (part.prompt_tokens + length / 2)
        return max(1, min(profile.max_running, int(profile.kv_cache_tokens * tokens / max(held, 1.0))))


def _trained_s(settled: Iterable[tuple[float, float]], pass_s: float) -> tuple[float, float]:
    """When the last group is there, and when the trainer is done with all.

    Args:
        settled: when each group is there and how long the trainer works on it, by time.
        pass_s: work for which it begins a pass; what comes meanwhile is for the next.
    """
    last_s = done_s = waiting_s = 0.0
    for last_s, work_s in settled:
        if waiting_s >= pass_s and last_s > done_s:
            done_s, waiting_s = done_s + waiting_s, 0.0
        if waiting_s < pass_s:
            done_s = max(done_s, last_s)
        waiting_s += work_s
    return last_s, done_s + waiting_s


def _changed(first: Share, second: Share, chance: random.Random) -> tuple[Share, Share]:
    """Two shares after a part of the first went to the second, or was exchanged for one of it."""
    given = {chance.choice(first)}
    taken = {chance.choice(second)} if second and chance.random() < 0.5 else set()
    return sorted({*first} - given | taken), sorted({*second} - taken | given)


def _cases(parts: Sequence[Part]) -> Array:
    """(cases, parts) lengths that forecasts hold possible; over the cases each is short once and long once."""
    num_cases = _NUM_CASES if any(part.lengths[0] != part.lengths[-1] for part in parts) else 1
    generator = np.random.default_rng(0)
    strata = np.array([generator.permutation(num_cases) for _ in parts]).reshape(len(parts), num_cases)
    levels = (strata + 0.5) / num_cases
    found = [
        np.interp(row, LEVELS, part.lengths) if len(part.lengths) > 1 else np.full(num_cases, part.lengths[0])
        for part, row in zip(parts, levels, strict=True)
    ]
    return np.maximum(np.round(np.array(found).reshape(len(parts), num_cases).T), 1.0)
