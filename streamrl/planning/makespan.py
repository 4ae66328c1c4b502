"""Dispatching for the least expected makespan. Pure.

Prompts are sorted by length and the sorted list is cut: the longest few go to instances of their own, where small
batches are fast, and each next instance takes as long a stretch as it can finish in the same time. As soon as what is
left could be dealt to all instances that are left, it is dealt, the longest first. Lengths are uncertain, so a time
counts as kept when few answers are expected to be late; how few is tried out, and the plan of the least expected
makespan is taken. Dealing everything, the longest first, is one of these plans, and stays unless cuts promise more.

Unlike the paper's Algorithm 2 it weighs the work that goes along with a long answer, cuts as often as pays, and does
not cut where that costs more than it brings. What it leaves out: that work can move later (moves.py), that answers of
a group are long together, and that a trainer works on what has come (iteration.py).
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamrl.planning.completion import Outlook, Work
from streamrl.planning.forecast import Array
from streamrl.planning.profile import InstanceProfile

_LATE = (0.005, 0.03, 0.1)
"""Expected late answers an instance, up to which a time counts as kept."""
_TIMES = 14
"""Times that are tried at once."""
_MOST_SETS = 96
"""A larger fleet is planned in sets of instances."""
_LEAST_GAIN = 0.005
"""Cuts must promise this share of the makespan: estimates are not better than that."""
_RISK = 0.1
"""Prompts are sorted by the length that they exceed with this probability."""
_FINE = 16
"""Lengths of a stretch that are tried at once."""
_FEW = 4
"""Prompts an instance, below which it matters that they are dealt whole."""


@dataclass(frozen=True, slots=True)
class FleetMember:
    """An instance that work can be given to."""

    profile: InstanceProfile
    """Instances with the same object are equally fast."""
    tokens_before: float = 0.0
    """Expected tokens that it still has to do of what it was given before."""


@dataclass(frozen=True)
class MakespanPlan:
    """Who draws what."""

    shares: list[list[int]]
    """For each instance the indices of its prompts, the longest first."""
    expected_s: float
    """Expected makespan, when nothing moves."""


@dataclass(frozen=True, slots=True)
class _Set:
    """Instances of one profile that are planned together."""

    members: tuple[int, ...]
    profile: InstanceProfile
    before: float

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def rate(self) -> float:
        """Tokens a second when full."""
        return self.size * self.profile.full_rate


Cuts = list[tuple[int, int]]
"""The stretch of each set, in order; the sets that are left share the rest."""


def plan_makespan(work: Work, members: Sequence[FleetMember]) -> MakespanPlan:
    """Divides prompts among instances.

    Args:
        members: one or more.
    """
    if not len(work.forecast):
        return MakespanPlan([[] for _ in members], 0.0)
    nothing = np.zeros(len(work.forecast))
    remaining = work.forecast.remaining(nothing, work.prompt_tokens, exceeded_with=_RISK)
    # Of equal risk in the order of the batch, which is a random one: what is alike in other ways may be wrong in the
    # same way, and would be together on one instance.
    order = np.argsort(-remaining.risk, kind="stable")
    outlook, sets = Outlook(work, remaining, order), _sets(members)
    uncut: Cuts = []
    best, best_s = uncut, expected_makespan_s(outlook, sets, uncut)
    if len(sets) > 1:
        promised = best_s * (1 - _LEAST_GAIN)
        for cuts in _cuts(outlook, sets, best_s):
            expected_s = expected_makespan_s(outlook, sets, cuts)
            if expected_s < min(best_s, promised):
                best, best_s = cuts, expected_s
    tokens = work.num_samples * remaining.mean
    # Where all get a bit of everything, what is alike is dealt in turn for the same reason.
    rest = order[(best[-1][1] if best else 0) * outlook.stride :]
    rest = rest[np.lexsort((-remaining.mean[rest], -remaining.risk[rest]))]
    return MakespanPlan(_deal(best, sets, order, rest, outlook.stride, tokens, members), best_s)


def expected_makespan_s(outlook: Outlook, sets: Sequence[_Set], cuts: Cuts) -> float:
    """The integral, over time, of the probability that something is late."""
    rest = cuts[-1][1] if cuts else 0
    starts = np.array([start for start, _ in cuts], dtype=np.int64)[:, None]
    ends = np.array([end for _, end in cuts], dtype=np.int64)[:, None]

    def probability(times: Array) -> Array:
        late = np.zeros(len(times))
        for members, profile in _by_profile(sets[: len(cuts)]):
            size = np.array([sets[index].size for index in members], dtype=np.float64)[:, None]
            before = np.array([sets[index].before for index in members])[:, None]
            each = outlook.late(profile, starts[members], ends[members], times[None, :], share=1 / size, before=before)
            late += (each * size).sum(axis=0)
        if rest < outlook.num_rows:
            late += _late_rest(outlook, sets[len(cuts) :], np.array(rest), times)
        return 1 - np.exp(-late)

    # From what all work takes at full batches on, in coarse steps, then finely where the probability falls from 1 to 0.
    work_s = (outlook.total_tokens + sum(part.size * part.before for part in sets)) / sum(part.rate for part in sets)
    times = max(work_s, 1e-9) * np.geomspace(0.5, 1e8, 100)
    chance = probability(times)
    low = times[max(int((chance > 0.999).sum()) - 1, 0)]
    high = times[min(int((chance > 1e-3).sum()), len(times) - 1)]
    times = np.linspace(low, high, 41)
    return float(low + np.trapezoid(probability(times), times))


def _cuts(outlook: Outlook, sets: Sequence[_Set], start_s: float) -> list[Cuts]:
    """For each share of late answers the cuts with which everything is done earliest."""
    late = np.repeat(_LATE, _TIMES)
    times = np.tile(np.linspace(0.4, 1.1, _TIMES), len(_LATE)) * start_s
    step = (times[1] - times[0]) / (_TIMES + 1)
    found = _try(outlook, sets, times, late)
    firsts = [next((lane for lane in _lanes(k) if found[lane] is not None), None) for k in range(len(_LATE))]
    again = [lane for lane in firsts if lane is not None and lane % _TIMES]
    if again:
        finer = np.concatenate([times[lane - 1] + step * np.arange(1, _TIMES + 1) for lane in again])
        refined = _try(outlook, sets, finer, np.repeat(late[again], _TIMES))
        for turn, lane in enumerate(again):
            for cuts in reversed(refined[turn * _TIMES : (turn + 1) * _TIMES]):
                if cuts is not None:
                    found[lane] = cuts
    return [cuts for lane in firsts if lane is not None and (cuts := found[lane])]


def _lanes(index: int) -> range:
    return range(index * _TIMES, (index + 1) * _TIMES)


def _try(outlook: Outlook, sets: Sequence[_Set], times: Array, late: Array) -> list[Cuts | None]:
    """For each time, with the late answers an instance that it allows: the cuts that keep it; None: it takes longer."""
    cuts: list[Cuts | None] = [[] for _ in times]
    lanes = np.arange(len(times))
    start = np.zeros(len(times), dtype=np.int64)
    for index, part in enumerate(sets):
        left = sum(other.size for other in sets[index:])
        open_ = _late_rest(outlook, sets[index:], start[lanes], times[lanes]) > late[lanes] * left
        lanes = lanes[open_]
        if not len(lanes):
            return cuts
        end = _longest_stretches(outlook, part, start[lanes], times[lanes], late[lanes])
        for lane, first, last in zip(lanes.tolist(), start[lanes].tolist(), end.tolist(), strict=True):
            if first == last:
                cuts[lane] = None
            elif (stretches := cuts[lane]) is not None:
                stretches.append((first, last))
        kept = (end > start[lanes]) & (end < outlook.num_rows)
        start[lanes] = end
        lanes = lanes[kept]
    for lane in lanes.tolist():
        cuts[lane] = None
    return cuts


def _longest_stretches(
    outlook: Outlook, part: _Set, start: NDArray[np.int64], times: Array, late: Array
) -> NDArray[np.int64]:
    """Up to where the answers from `start` on are done in time on a set, all of them at once."""
    num_rows = outlook.num_rows

    def fit(ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many of (lanes, k) ends, which ascend, are near enough."""
        ends = np.minimum(ends, num_rows)
        first = start[:, None]
        expected = outlook.late(
            part.profile, first, ends, times[:, None], share=1 / part.size, before=part.before, queue=False
        )
        places = outlook.places(part.profile, first, ends) * part.size
        fits = (expected <= late[:, None]) & (outlook.num_samples(first, ends) <= places)
        return np.asarray(np.logical_and.accumulate(fits, axis=1).sum(axis=1))

    doubling = 2 ** np.arange(num_rows.bit_length() + 1)
    passed = fit(start[:, None] + doubling)
    width = np.where(passed > 0, doubling[np.maximum(passed - 1, 0)], 0)
    step = np.maximum(width // _FINE, 1)
    end = start + width
    while True:
        end = end + step * fit(end[:, None] + step[:, None] * np.arange(1, _FINE)) * (width > 0)
        if (step == 1).all():
            return np.asarray(np.minimum(end, num_rows))
        step = np.maximum(step // _FINE, 1)


def _late_rest(outlook: Outlook, sets: Sequence[_Set], start: NDArray[np.int64], times: Array) -> Array:
    """Expected late answers when the rest is dealt to all of some sets."""
    total = sum(part.rate for part in sets)
    rows = np.maximum((outlook.num_rows - start) * outlook.stride, 1)
    late = np.zeros(len(times))
    for members, profile in _by_profile(sets):
        size = sum(sets[index].size for index in members)
        before = sum(sets[index].size * sets[index].before for index in members) / size
        # Prompts are dealt whole. Of few, some instances get one more than others: those are late.
        each = rows * profile.full_rate / total
        whole = np.where(each < _FEW, np.maximum(np.ceil(each - 1e-9), 1), each)
        expected = outlook.late(profile, start, outlook.num_rows, times, share=whole / rows, before=before)
        late += size * each / whole * expected
    return late


def _by_profile(sets: Sequence[_Set]) -> list[tuple[list[int], InstanceProfile]]:
    """The indices of the sets of each profile."""
    found: dict[int, tuple[list[int], InstanceProfile]] = {}
    for index, part in enumerate(sets):
        found.setdefault(id(part.profile), ([], part.profile))[0].append(index)
    return list(found.values())


def _sets(members: Sequence[FleetMember]) -> list[_Set]:
    """The fastest first, for the longest answers; of equal ones those with the least to do."""
    size = -(-len(members) // _MOST_SETS)
    by_profile: dict[int, list[int]] = {}
    for index, member in enumerate(members):
        by_profile.setdefault(id(member.profile), []).append(index)
    sets = []
    for indices in sorted(by_profile.values(), key=lambda indices: members[indices[0]].profile.token_latency(1)):
        indices.sort(key=lambda index: (members[index].tokens_before, index))
        for start in range(0, len(indices), size):
            part = tuple(indices[start : start + size])
            before = sum(members[index].tokens_before for index in part) / len(part)
            sets.append(_Set(part, members[part[0]].profile, before))
    return sets


def _deal(
    cuts: Cuts,
    sets: Sequence[_Set],
    order: NDArray[np.int64],
    rest: NDArray[np.int64],
    stride: int,
    tokens: Array,
    members: Sequence[FleetMember],
) -> list[list[int]]:
    """The stretches as cut, dealt in turn inside a set; the rest to the instance that is done first."""
    shares: list[list[int]] = [[] for _ in members]
    for part, (start, end) in zip(sets, cuts, strict=False):
        stretch = order[start * stride : end * stride].tolist()
        for turn, member in enumerate(part.members):
            shares[member] += stretch[turn :: part.size]
    heap = [
        (members[member].tokens_before / part.profile.full_rate, turn, member, 1 / part.profile.full_rate)
        for turn, (part, member) in enumerate((part, member) for part in sets[len(cuts) :] for member in part.members)
    ]
    heapq.heapify(heap)
    for prompt, work in zip(rest.tolist(), tokens[rest].tolist(), strict=True):
        done_s, turn, member, token_s = heap[0]
        shares[member].append(prompt)
        heapq.heapreplace(heap, (done_s + work * token_s, turn, member, token_s))
    return shares
