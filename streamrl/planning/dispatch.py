"""Which instance generates which part of a batch, and in which order.

Pure: the same arguments give the same plan. It plans with estimates of lengths and knows nothing of where they come
from, of versions, or of what happens to the plan later.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

PIECES_PER_INSTANCE = 4
"""Groups are cut when there are fewer than this for each instance: with fewer, no plan balances."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Answers of one group that one instance draws together, sharing the cache of their prompt."""

    group: int
    samples: tuple[int, ...]
    expected_tokens: int
    """Expected length of one answer."""

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


Deal = Callable[[Sequence[Piece], Sequence[InstanceLoad], int], list[list[Piece]]]
"""(pieces, instances by name, seed) to one list of pieces an instance, in the order in which they should start."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A way to plan."""

    deal: Deal
    longest_first: bool
    """Whether an instance starts what it has by descending expected length, or in the order in which it comes."""


def plan(
    policy: str, pieces: Sequence[Piece], instances: Sequence[InstanceLoad], *, seed: int = 0
) -> dict[str, list[Piece]]:
    """Divides pieces among instances, cutting groups when there are too few to balance.

    Args:
        policy: a name in POLICIES.
        pieces: of one batch.
        instances: with different names.
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
    dealt = deal(cut(pieces, len(ordered)), ordered, seed)
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
    parts = []
    for piece in pieces:
        num_samples = len(piece.samples)
        num_parts = max(min(wanted, num_samples), 1)
        bounds = [part * num_samples // num_parts for part in range(num_parts + 1)]
        parts += [replace(piece, samples=piece.samples[start:end]) for start, end in itertools.pairwise(bounds)]
    return parts


def _longest_first(pieces: Sequence[Piece], instances: Sequence[InstanceLoad], _seed: int) -> list[list[Piece]]:
    """Longest processing time first (Graham's list scheduling): each piece, the longest first, goes to the instance
    that would be done with it earliest."""
    dealt: list[list[Piece]] = [[] for _ in instances]
    # Among instances of one size the least loaded is done first: one heap a size makes this fast for large fleets.
    heaps: dict[int, list[tuple[int, int]]] = {}
    for index, instance in enumerate(instances):
        heaps.setdefault(instance.max_running, []).append((instance.outstanding_tokens, index))
    for heap in heaps.values():
        heapq.heapify(heap)
    for piece in sorted(pieces, key=_by_descending_length):
        done_at = {size: (heap[0][0] + piece.work_tokens) / size for size, heap in heaps.items()}
        size = min(done_at, key=lambda size: (done_at[size], -size))
        load, index = heaps[size][0]
        heapq.heapreplace(heaps[size], (load + piece.work_tokens, index))
        dealt[index].append(piece)
    return dealt


def _round_robin(pieces: Sequence[Piece], instances: Sequence[InstanceLoad], _seed: int) -> list[list[Piece]]:
    """The longest first, dealt like cards, beginning with the instance that has least to do."""
    dealt: list[list[Piece]] = [[] for _ in instances]
    loads = [instance.outstanding_tokens / instance.max_running for instance in instances]
    turns = sorted(range(len(instances)), key=lambda index: (loads[index], index))
    for turn, piece in enumerate(sorted(pieces, key=_by_descending_length)):
        dealt[turns[turn % len(turns)]].append(piece)
    return dealt


def _random(pieces: Sequence[Piece], instances: Sequence[InstanceLoad], seed: int) -> list[list[Piece]]:
    """Each piece to any instance, in the order of the batch: what a fleet without a plan does (paper, Fig 9)."""
    generator = random.Random(seed)
    dealt: list[list[Piece]] = [[] for _ in instances]
    for piece in pieces:
        dealt[generator.randrange(len(instances))].append(piece)
    return dealt


def _by_descending_length(piece: Piece) -> tuple[int, int, int, tuple[int, ...]]:
    return -piece.expected_tokens, -len(piece.samples), piece.group, piece.samples


POLICIES: dict[str, Policy] = {
    "longest_first": Policy(_longest_first, longest_first=True),
    "round_robin": Policy(_round_robin, longest_first=True),
    "random": Policy(_random, longest_first=False),
}
"""By the name that `scheduler.dispatch` has."""
