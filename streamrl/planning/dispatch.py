"""Which instance generates which part of a batch, and in which order: all policies behind one name.

Pure: the same arguments give the same plan. It plans with estimates of lengths and knows nothing of where they come
from, of versions, or of what happens to the plan later. The policies themselves: here the simple ones, the paper's in
streamrl/planning/skewness.py, ours in streamrl/planning/makespan.py.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from streamrl.planning.completion import Work
from streamrl.planning.forecast import LengthForecast
from streamrl.planning.iteration import MOST_ANSWERS, IterationPlanner, Part, TrainerPace
from streamrl.planning.makespan import FleetMember, MakespanPlan, plan_makespan
from streamrl.planning.profile import InstanceProfile, TokenLatency
from streamrl.planning.skewness import Objective, plan_by_skewness

PIECES_PER_INSTANCE = 4
"""Groups are cut when there are fewer than this for each instance: with fewer, no plan balances."""

_WHOLE_PER_INSTANCE = 16
"""With so many groups for each instance `makespan` does not ask whether cutting them pays."""
_SPLITTING_GAIN = 0.01
"""Share of the makespan that cutting groups must spare."""
_NO_TRAINER = TrainerPace(0.0, 0)


@dataclass(frozen=True, slots=True)
class Piece:
    """Answers of one group that one instance draws together, sharing the cache of their prompt."""

    group: int
    samples: tuple[int, ...]
    expected_tokens: int
    """Expected length of one answer."""
    lengths: tuple[float, ...] = ()
    """Lengths that one answer does not exceed with the probabilities of `forecast.LEVELS`; (): it is as expected."""
    prompt_tokens: int = 0

    @property
    def work_tokens(self) -> int:
        return len(self.samples) * self.expected_tokens


@dataclass(frozen=True, slots=True)
class InstanceLoad:
    """An instance that work can be given to."""

    name: str
    max_running: int
    """Sequences that it runs at once: what it does in a given time is taken to be proportional to it."""
    outstanding_tokens: int = 0
    """Expected tokens of what it was given before."""
    profile: InstanceProfile | None = None
    """What was measured; the same object for instances that are equally fast. None: nothing was yet."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What a policy deals."""

    pieces: Sequence[Piece]
    instances: Sequence[InstanceLoad]
    """By name."""
    length_p50: float | None = None
    """Of recent answers, for the paper's policies; None: of these pieces."""
    length_p90: float | None = None
    trainer_pace: TrainerPace | None = None
    seed: int = 0


Deal = Callable[[Batch], list[list[Piece]]]
"""To one list of pieces an instance, in the order in which they should start."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A way to plan."""

    deal: Deal
    longest_first: bool
    """Whether an instance starts what it has by descending expected length, or in the order in which it comes."""


def plan(
    policy: str,
    pieces: Sequence[Piece],
    instances: Sequence[InstanceLoad],
    *,
    length_p50: float | None = None,
    length_p90: float | None = None,
    trainer_pace: TrainerPace | None = None,
    seed: int = 0,
) -> dict[str, list[Piece]]:
    """Divides pieces among instances, cutting groups when there are too few to balance.

    Args:
        policy: a name in POLICIES.
        pieces: of one batch.
        instances: with different names.
        length_p50, length_p90: of recent answers, for the paper's policies.
        trainer_pace: of a trainer that the next batch waits for, and that works while answers come, for `makespan`;
            None: the end of generation is what counts.
        seed: of policies that draw.

    Returns:
        For each instance that gets something, by name, its pieces in the order in which they should start. Together
        they hold each sample exactly once.

    Raises:
        ValueError: the policy is unknown, or there is no instance.
    """
    deal = named_policy(policy).deal
    if not instances:
        raise ValueError("expected at least one instance to plan for, got none")
    ordered = sorted(instances, key=lambda instance: instance.name)
    dealt = deal(Batch(pieces, ordered, length_p50, length_p90, trainer_pace, seed))
    return {instance.name: share for instance, share in zip(ordered, dealt, strict=True) if share}


def named_policy(name: str) -> Policy:
    """A policy by its name in the settings.

    Raises:
        ValueError: there is none of this name.
    """
    if name not in POLICIES:
        raise ValueError(f"dispatch policy {name!r} is unknown: expected one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name]


def cut(pieces: Sequence[Piece], num_instances: int) -> list[Piece]:
    """Cuts groups into parts of nearly equal size when there are fewer than PIECES_PER_INSTANCE for each instance."""
    if not pieces or len(pieces) >= PIECES_PER_INSTANCE * num_instances:
        return list(pieces)
    wanted = min(-(-PIECES_PER_INSTANCE * num_instances // len(pieces)), num_instances)
    return _parts(pieces, wanted)


def _parts(pieces: Sequence[Piece], wanted: int) -> list[Piece]:
    parts = []
    for piece in pieces:
        num_samples = len(piece.samples)
        num_parts = max(min(wanted, num_samples), 1)
        bounds = [part * num_samples // num_parts for part in range(num_parts + 1)]
        parts += [replace(piece, samples=piece.samples[start:end]) for start, end in itertools.pairwise(bounds)]
    return parts


def _longest_first(batch: Batch) -> list[list[Piece]]:
    """Longest processing time first (Graham's list scheduling): each piece, the longest first, goes to the instance
    that would be done with it earliest."""
    instances = batch.instances
    dealt: list[list[Piece]] = [[] for _ in instances]
    # Among instances of one size the least loaded is done first: one heap a size makes this fast for large fleets.
    heaps: dict[int, list[tuple[int, int]]] = {}
    for index, instance in enumerate(instances):
        heaps.setdefault(instance.max_running, []).append((instance.outstanding_tokens, index))
    for heap in heaps.values():
        heapq.heapify(heap)
    for piece in sorted(cut(batch.pieces, len(instances)), key=_by_descending_length):
        done_at = {size: (heap[0][0] + piece.work_tokens) / size for size, heap in heaps.items()}
        size = min(done_at, key=lambda size: (done_at[size], -size))
        load, index = heaps[size][0]
        heapq.heapreplace(heaps[size], (load + piece.work_tokens, index))
        dealt[index].append(piece)
    return dealt


def _round_robin(batch: Batch) -> list[list[Piece]]:
    """The longest first, dealt like cards, beginning with the instance that has least to do."""
    instances = batch.instances
    dealt: list[list[Piece]] = [[] for _ in instances]
    loads = [instance.outstanding_tokens / instance.max_running for instance in instances]
    turns = sorted(range(len(instances)), key=lambda index: (loads[index], index))
    for turn, piece in enumerate(sorted(cut(batch.pieces, len(instances)), key=_by_descending_length)):
        dealt[turns[turn % len(turns)]].append(piece)
    return dealt


def _random(batch: Batch) -> list[list[Piece]]:
    """Each piece to any instance, in the order of the batch: what a fleet without a plan does (paper, Fig 9)."""
    generator = random.Random(batch.seed)
    dealt: list[list[Piece]] = [[] for _ in batch.instances]
    for piece in cut(batch.pieces, len(batch.instances)):
        dealt[generator.randrange(len(batch.instances))].append(piece)
    return dealt


def _by_skewness(objective: Objective) -> Deal:
    """The paper's Algorithm 2. It knows one kind of instance: that of the first."""

    def deal(batch: Batch) -> list[list[Piece]]:
        if not batch.pieces:
            return [[] for _ in batch.instances]
        pieces = cut(batch.pieces, len(batch.instances))
        lengths = [float(piece.expected_tokens) for piece in pieces]
        first = batch.instances[0]
        found = plan_by_skewness(
            lengths,
            len(batch.instances),
            token_latency=profile_of(first).token_latency,
            # Eq 2 counts answers, and these are pieces.
            max_batch=max(1, round(first.max_running * len(pieces) / sum(len(piece.samples) for piece in pieces))),
            length_p50=batch.length_p50 or float(np.quantile(lengths, 0.5)),
            length_p90=batch.length_p90 or float(np.quantile(lengths, 0.9)),
            objective=objective,
        )
        return [[pieces[index] for index in share] for share in found.instances]

    return deal


def _makespan(batch: Batch) -> list[list[Piece]]:
    """The least expected makespan. A group stays whole, so that its prompt is computed once, unless cutting pays."""
    pieces, members = list(batch.pieces), _members(batch.instances)
    found = _plan_pieces(pieces, members)
    if len(pieces) < _WHOLE_PER_INSTANCE * len(members):
        largest = max((len(piece.samples) for piece in pieces), default=1)
        parts = _parts(pieces, min(len(members), largest))
        if len(parts) > len(pieces):
            in_parts = _plan_pieces(parts, members)
            again = sum(part.prompt_tokens for part in parts) - sum(piece.prompt_tokens for piece in pieces)
            cost_s = again * max(member.profile.prefill_token_s for member in members) / len(members)
            if in_parts.expected_s + cost_s < found.expected_s * (1 - _SPLITTING_GAIN):
                pieces, found = parts, in_parts
    shares, num_answers = found.shares, sum(len(piece.samples) for piece in pieces)
    measured = all(instance.profile is not None for instance in batch.instances)
    pace = batch.trainer_pace if measured and batch.trainer_pace is not None else _NO_TRAINER
    # Answers of a group err together, of which that plan knows nothing.
    closely = pace.token_s > 0 or len(pieces) < num_answers
    if closely and len(members) > 1 and 0 < num_answers <= MOST_ANSWERS:
        shares = _bettered(pieces, members, shares, pace)
    return [[pieces[index] for index in share] for share in shares]


def _bettered(
    pieces: Sequence[Piece],
    members: Sequence[FleetMember],
    shares: Sequence[Sequence[int]],
    pace: TrainerPace,
) -> list[list[int]]:
    """Looks closely at a plan, and at the longest dealt in turn, and takes the best that either can be made."""
    order = sorted(range(len(pieces)), key=lambda index: _by_descending_length(pieces[index]))
    parts = [
        Part(piece.group, len(piece.samples), piece.prompt_tokens, piece.lengths or (float(piece.expected_tokens),))
        for piece in map(pieces.__getitem__, order)
    ]
    profiles = [member.profile for member in members]
    busy_s = [member.tokens_before / member.profile.full_rate for member in members]
    planner = IterationPlanner(parts, profiles, busy_s, pace)
    places = {index: place for place, index in enumerate(order)}
    planned = [sorted(places[index] for index in share) for share in shares]
    in_turn = [list(range(first, len(order), len(members))) for first in range(len(members))]
    return [[order[place] for place in share] for share in planner.best_from([planned, in_turn])]


def _plan_pieces(pieces: Sequence[Piece], members: Sequence[FleetMember]) -> MakespanPlan:
    if all(piece.lengths for piece in pieces):
        forecast = (
            LengthForecast(np.array([piece.lengths for piece in pieces]).reshape(len(pieces), -1))
            if pieces
            else LengthForecast.exact([])
        )
    else:
        forecast = LengthForecast.exact([piece.expected_tokens for piece in pieces])
    num_samples = np.array([len(piece.samples) for piece in pieces], dtype=np.int64)
    prompt_tokens = np.array([piece.prompt_tokens for piece in pieces], dtype=np.float64)
    return plan_makespan(Work(forecast, num_samples, prompt_tokens), members)


def _members(instances: Sequence[InstanceLoad]) -> list[FleetMember]:
    """Instances of which nothing was measured, and that are equally large, are equally fast."""
    unknown: dict[int, InstanceProfile] = {}
    return [
        FleetMember(
            instance.profile or unknown.setdefault(instance.max_running, profile_of(instance)),
            instance.outstanding_tokens,
        )
        for instance in instances
    ]


def profile_of(instance: InstanceLoad) -> InstanceProfile:
    """What was measured, or a guess: a step of a full batch takes twice as long as that of a single sequence."""
    if instance.profile is not None:
        return instance.profile
    size = instance.max_running
    return InstanceProfile(TokenLatency({1: 1.0, size: 2.0} if size > 1 else {1: 1.0}), size)


def _by_descending_length(piece: Piece) -> tuple[int, int, int, tuple[int, ...]]:
    return -piece.expected_tokens, -len(piece.samples), piece.group, piece.samples


POLICIES: dict[str, Policy] = {
    "paper": Policy(_by_skewness("sum"), longest_first=True),
    "paper_max": Policy(_by_skewness("max"), longest_first=True),
    "makespan": Policy(_makespan, longest_first=True),
    "longest_first": Policy(_longest_first, longest_first=True),
    "round_robin": Policy(_round_robin, longest_first=True),
    "random": Policy(_random, longest_first=False),
}
"""By the name that `scheduler.dispatch` has."""
