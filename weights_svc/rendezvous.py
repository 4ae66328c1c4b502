"""Who is sent a version in one broadcast: a pure state machine, which is told who comes and when the time is over.

A version is gathered for once. It goes by NCCL when everybody who is known takes part, in one group whose ranks follow
from the members' names; the group stays while they stay the same. If one is missing, the version takes the ordinary way
to all: a receiver that will not come cannot be told from one that is late. Who is missing twice in a row is no longer
known, so that a dead one holds up two versions and no more. Who comes late, or for another version, takes the ordinary
way and is known from then on.
"""

from dataclasses import dataclass

_MAX_MISSES = 2


@dataclass(frozen=True, slots=True)
class Membership:
    """The receivers of one group, by name in order. The sender is rank 0."""

    members: tuple[str, ...]

    @property
    def world_size(self) -> int:
        return 1 + len(self.members)

    def rank(self, receiver: str) -> int:
        return 1 + self.members.index(receiver)


class Rendezvous:
    """One version at a time: come, close, then moved or failed."""

    def __init__(self) -> None:
        self.group: Membership | None = None
        """Whose ranks have met; None: there is no group, or it has to meet anew."""
        self.moving = False
        """Between a `close` that gave a membership and what became of it."""
        self.num_failures = 0
        """In a row."""
        self._misses: dict[str, int] = {}
        """In a row, of each receiver that is known."""
        self._newcomers: set[str] = set()
        self._gathered: set[tuple[int, str]] = set()
        """Versions, by number and digest."""
        self._gathering: tuple[int, str] | None = None
        self._came: set[str] = set()
        self._outside: set[str] = set()
        """Those of them that are not in the group any more, or are not yet."""

    @property
    def gathering(self) -> bool:
        """Whether a `close` is due."""
        return self._gathering is not None

    @property
    def complete(self) -> bool:
        """Whether all have come, so that nothing is to be waited for. Others that are new may follow a new one."""
        return self.gathering and not self._newcomers and self._came == set(self._misses)

    def come(self, receiver: str, version: tuple[int, str], *, in_group: bool) -> bool:
        """A receiver asks for a version.

        Args:
            in_group: whether it is in `group`: one that has been started anew is not.

        Returns:
            Whether it takes part; else it takes the ordinary way.
        """
        if receiver not in self._misses:
            self._misses[receiver] = 0
            self._newcomers.add(receiver)
        if self.moving or (self._gathering != version and (self.gathering or version in self._gathered)):
            return False
        if not self.gathering:
            self._gathering = version
            self._gathered.add(version)
        self._came.add(receiver)
        if not in_group:
            self._outside.add(receiver)
        return True

    def withdraw(self, receiver: str) -> None:
        """A receiver that came has gone before the gathering was closed."""
        self._came.discard(receiver)

    def close(self) -> Membership | None:
        """Ends the gathering: all have come, or the time is over.

        Returns:
            Who meets in a group, the one that there is if it equals `group`; None: all take the ordinary way.
        """
        assert self.gathering, "nobody has come"
        came, self._came, self._gathering = self._came, set(), None
        outside, self._outside = self._outside & came, set()
        self._newcomers.clear()
        missing = set(self._misses) - came
        for receiver in came:
            self._misses[receiver] = 0
        for receiver in missing:
            self._misses[receiver] += 1
            if self._misses[receiver] >= _MAX_MISSES:
                del self._misses[receiver]
        if missing or not came:
            return None
        if outside:
            self.group = None
        self.moving = True
        return Membership(tuple(sorted(came)))

    def moved(self, membership: Membership) -> None:
        """The version was sent; the group stays."""
        self.group, self.moving, self.num_failures = membership, False, 0

    def failed(self) -> None:
        """The group did not meet, or broke while it was sent the version. Its members each take the ordinary way."""
        self.group, self.moving = None, False
        self.num_failures += 1
