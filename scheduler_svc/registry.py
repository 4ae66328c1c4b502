"""The fleet: instances, their incarnations, partitions and leases. Pure state: time is an argument.

A lease is two-sided. An instance that hears nothing for `lease_s` stops by itself; the registry gives it up when it has
heard nothing for twice as long, so that by then it has stopped, also when the last answer was half a lease late. What a
life owns is kept here; what happens to it afterwards is the ledger's decision.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduler_svc.batches import Sample
from scheduler_svc.observed_latency import ObservedLatency
from streamrl.batch_progress import progress_of
from streamrl.errors import RefusedError
from streamrl.identity import SampleKey
from streamrl.v1.scheduler_pb2 import (
    INSTANCE_STATE_DEAD,
    INSTANCE_STATE_DRAINING,
    INSTANCE_STATE_LIVE,
    HeartbeatRequest,
    InstanceState,
    RegisterRequest,
)

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Life:
    """One incarnation of an instance."""

    request: RegisterRequest
    incarnation: int
    partition: int
    lease_s: float
    heard_at: float
    """When it registered or last sent a heartbeat."""
    heartbeat: HeartbeatRequest = field(default_factory=HeartbeatRequest)
    """The last one, without its revokes and its progress."""
    draining: bool = False
    stopped_at: float | None = None
    """When it said that nothing of it runs any more."""
    ended: bool = False
    """Nothing is expected of it any more and it owns nothing."""
    samples: dict[SampleKey, Sample] = field(default_factory=dict)
    """What was assigned to it and is neither accepted nor given to others."""
    outstanding_tokens: int = 0
    """Expected tokens of `samples`."""
    revokes: dict[SampleKey, None] = field(default_factory=dict)
    """What it is asked to give back and has not answered."""
    moves: dict[SampleKey, "Move"] = field(default_factory=dict)
    """What it is asked to give back for another instance, and has not answered."""
    tokens_there: dict[SampleKey, int] = field(default_factory=dict)
    """How far the answers are that run, as of its last heartbeat."""
    begun: set[SampleKey] = field(default_factory=set)
    """Samples of its that are known to have begun, or to be over."""
    latency: ObservedLatency = field(init=False)
    """How long its steps take."""
    has_news: bool = False
    """Whether there is something to tell it."""

    def __post_init__(self) -> None:
        self.latency = ObservedLatency(self.request.profile if self.request.HasField("profile") else None)

    @property
    def name(self) -> str:
        return self.request.instance

    @property
    def ends_at(self) -> float:
        """When it is given up unless it is heard of. After an orderly stop rollouts may be on their way for a lease."""
        return self.heard_at + 2 * self.lease_s if self.stopped_at is None else self.stopped_at + self.lease_s

    @property
    def room(self) -> int:
        """Samples that it could begin at once. Those that were finished and are not accepted yet count as running, so
        that it is never taken to have more room than it has."""
        return max(0, self.request.max_running - len(self.samples))

    @property
    def state(self) -> InstanceState.ValueType:
        if self.ended or self.stopped_at is not None:
            return INSTANCE_STATE_DEAD
        return INSTANCE_STATE_DRAINING if self.draining else INSTANCE_STATE_LIVE

    def hear(self, heartbeat: HeartbeatRequest, now: float) -> None:
        """Notes a heartbeat; its revokes have been dealt with."""
        self.heard_at = now
        self.draining |= heartbeat.draining
        self.heartbeat = heartbeat
        self.latency.take(heartbeat.step_latencies)
        self.tokens_there = progress_of(heartbeat.progress)
        self.begun |= self.tokens_there.keys() & self.samples.keys()
        for field_name in ("revoked", "not_revoked", "progress"):
            self.heartbeat.ClearField(field_name)

    def revoke(self, key: SampleKey) -> None:
        """Asks it to give a sample back, if it may have begun with it."""
        if self.runs():
            self.revokes[key] = None
            self.has_news = True

    def ask_for(self, keys: Iterable[SampleKey], move: "Move") -> None:
        """Asks it to give samples back for another instance."""
        self.moves.update(dict.fromkeys(keys, move))
        self.has_news = True

    def end(self) -> None:
        """Its lease is over for good."""
        assert not self.samples, f"{self} ends and still owns {len(self.samples)} samples"
        self.ended = True
        self.revokes.clear()
        self.moves.clear()
        self.has_news = True

    def runs(self) -> bool:
        """Whether something of it may run."""
        return not self.ended and self.stopped_at is None

    def heard_lately(self, now: float) -> bool:
        """Whether it may be spoken to unasked. What it hears renews its own count of the lease, so to one that was
        silent for half of it nothing more is said: it must have stopped before it is given up."""
        return self.runs() and now - self.heard_at < self.lease_s / 2

    def takes_work(self, now: float) -> bool:
        return self.runs() and not self.draining and now - self.heard_at < self.lease_s

    def __str__(self) -> str:
        return f"{self.name} (incarnation {self.incarnation})"


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """What is asked of an instance about a sample."""

    target: Life | None = None
    """Who should have it; None: whoever the plan says."""
    begun_too: bool = False
    """Whether it is to be given back with its tokens if it has begun."""


class Registry:
    """The newest life of each instance, by name."""

    def __init__(self, *, max_instances: int, lease_s: float, first_incarnation: int) -> None:
        """
        Args:
            first_incarnation: above those of all earlier lives of the scheduler, so that nobody mistakes an old
                assignment for one of its own.
        """
        self._max_instances = max_instances
        self._lease_s = lease_s
        self._next_incarnation = first_incarnation
        self._lives: dict[str, Life] = {}
        self.first_registered_at: float | None = None
        self._past_dead_letters = 0
        """Of lives that were superseded or forgotten."""

    @property
    def dead_letters(self) -> int:
        """Records that instances could not handle, over all their lives."""
        return self._past_dead_letters + sum(life.heartbeat.dead_letters for life in self._lives.values())

    def lives(self) -> list[Life]:
        """All that are known, also ended ones, by name."""
        return [self._lives[name] for name in sorted(self._lives)]

    def find(self, name: str, incarnation: int) -> Life | None:
        """A life that has not ended."""
        life = self._lives.get(name)
        return life if life is not None and life.incarnation == incarnation and not life.ended else None

    def register(self, request: RegisterRequest, now: float) -> tuple[Life, Life | None]:
        """Begins a life.

        Returns:
            It, and the life of the same name that it supersedes, if that has not ended.

        Raises:
            ValueError: the request has no name or no room for a sequence.
            RefusedError: every partition belongs to an instance that is not dead.
        """
        if not request.instance or request.max_running < 1:
            raise ValueError(
                f"expected a name and max_running of 1 or more, got {request.instance!r} and {request.max_running}"
            )
        earlier = self._lives.get(request.instance)
        partition = earlier.partition if earlier is not None else self._free_partition()
        if earlier is not None:
            self._past_dead_letters += earlier.heartbeat.dead_letters
        life = Life(request, self._next_incarnation, partition, self._lease_s, now)
        self._next_incarnation += 1
        self._lives[life.name] = life
        if self.first_registered_at is None:
            self.first_registered_at = now
        logger.info("%s at site %r registered: partition %d", life, request.site, partition)
        return life, earlier if earlier is not None and not earlier.ended else None

    def expired(self, now: float) -> list[Life]:
        """Lives whose time is over and that have not been ended."""
        return [life for life in self.lives() if not life.ended and now >= life.ends_at]

    def next_expiry(self) -> float | None:
        """When the next life would expire; None: there is none."""
        return min((life.ends_at for life in self._lives.values() if not life.ended), default=None)

    def _free_partition(self) -> int:
        """The lowest that nobody has; when all are taken, that of the instance that has been dead longest."""
        taken = {life.partition for life in self._lives.values()}
        for partition in range(self._max_instances):
            if partition not in taken:
                return partition
        dead = [life for life in self._lives.values() if life.ended]
        if not dead:
            raise RefusedError(
                f"{len(self._lives)} instances are registered, and scheduler.max_instances is {self._max_instances}: "
                "raise it for a new run, or drain an instance first"
            )
        oldest = min(dead, key=lambda life: (life.ends_at, life.name))
        del self._lives[oldest.name]
        self._past_dead_letters += oldest.heartbeat.dead_letters
        return oldest.partition
