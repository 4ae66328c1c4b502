"""A fleet in simulated time: instances that work side by side, and sequences that move between them. Pure.

What it leaves out: weight versions, and anything that fails.
"""

import heapq
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from streamrl.planning.profile import InstanceProfile
from streamrl.planning.simulated_instance import SimulatedInstance, SimulatedSequence


@dataclass(frozen=True, slots=True)
class Ending:
    """A sequence that ended."""

    key: Hashable
    instance: int
    time_s: float


class SimulatedFleet:
    """Instances are numbered from 0."""

    def __init__(self, profiles: Sequence[InstanceProfile], *, transfer_s: float = 0.0) -> None:
        """
        Args:
            transfer_s: from the moment in which a sequence is taken from an instance to when another has it. What the
                other computes again of its tokens comes on top, by its profile.
        """
        self.instances = [SimulatedInstance(profile) for profile in profiles]
        self.transfer_s = transfer_s
        self.time_s = 0.0
        self.moved = 0
        """Sequences that were moved."""
        self.moved_tokens = 0
        """Tokens that they had."""
        self._arriving: list[list[tuple[float, int, SimulatedSequence]]] = [[] for _ in profiles]

    def submit(self, instance: int, sequences: Iterable[SimulatedSequence]) -> None:
        for sequence in sequences:
            self.instances[instance].submit(sequence)

    def move(self, key: Hashable, source: int, target: int) -> bool:
        """Takes a sequence from one instance to another, where it goes on with the tokens that it has.

        Returns:
            Whether it was there.
        """
        sequence = self.instances[source].withdraw(key)
        if sequence is None:
            return False
        self.moved += 1
        self.moved_tokens += sequence.tokens_there
        heapq.heappush(self._arriving[target], (self.time_s + self.transfer_s, self.moved, sequence))
        return True

    def advance(self, until_s: float) -> list[Ending]:
        """Goes on until a time."""
        endings: list[Ending] = []
        for index, instance in enumerate(self.instances):
            arriving = self._arriving[index]
            while arriving and arriving[0][0] <= until_s:
                endings += _endings(index, instance, arriving[0][0])
                instance.submit(heapq.heappop(arriving)[2])
            endings += _endings(index, instance, until_s)
        self.time_s = until_s
        return endings

    def is_idle(self) -> bool:
        """Whether nothing is left."""
        return not any(self._arriving) and not any(instance.running or instance.waiting for instance in self.instances)


def _endings(index: int, instance: SimulatedInstance, until_s: float) -> list[Ending]:
    return [Ending(sequence.key, index, time_s) for sequence, time_s in instance.advance(until_s)]


def makespan_s(shares: Sequence[Sequence[SimulatedSequence]], profiles: Sequence[InstanceProfile]) -> float:
    """How long a fleet is busy with what each instance was given, when nothing moves."""
    last = 0.0
    for share, profile in zip(shares, profiles, strict=True):
        instance = SimulatedInstance(profile)
        for sequence in share:
            instance.submit(sequence)
        instance.advance(float("inf"))
        last = max(last, instance.time_s)
    return last


Mover = Callable[[SimulatedFleet], None]
"""Looks at a fleet and moves what it wants to."""


def run(fleet: SimulatedFleet, mover: Mover, pause_s: Callable[[float], float]) -> float:
    """Goes on until nothing is left.

    Args:
        pause_s: from a time to how long after it the mover looks next.

    Returns:
        When the last sequence ended.
    """
    last_s = 0.0
    while not fleet.is_idle():
        endings = fleet.advance(fleet.time_s + pause_s(fleet.time_s))
        last_s = max((ending.time_s for ending in endings), default=last_s)
        mover(fleet)
    return last_s
