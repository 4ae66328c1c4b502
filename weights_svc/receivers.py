"""Who is fetching what, and what each receiver last loaded. No clock and no gRPC: times come as arguments."""

from collections import Counter
from dataclasses import dataclass, field

from streamrl.v1.weights_pb2 import TRANSFER_FORMAT_DELTA, AcknowledgeRequest, NegotiateRequest, Receiver
from weights_svc.negotiate import Relay

FETCH_GRACE_S = 60.0
"""A version stays for a receiver that has negotiated it, or whose fetch has ended, for this long without an
acknowledgement: time to begin, or to go on after a break."""
BASE_GRACE_S = 600.0
"""What a receiver of differences holds stays, as their base, while it watches and for this long after it was last heard
of: a line that breaks for minutes does not cost a whole copy."""


@dataclass(slots=True)
class _State:
    acknowledged: AcknowledgeRequest | None = None
    fetching: Counter[int] = field(default_factory=Counter)
    expected_until_s: dict[int, float] = field(default_factory=dict)
    sent_whole: set[int] = field(default_factory=set)
    site: str = ""
    serving_address: str = ""
    takes_deltas: bool = False
    held_version: int | None = None
    num_watches: int = 0
    heard_s: float = 0.0


class Receivers:
    """All receivers that this service has met."""

    def __init__(self) -> None:
        self._states: dict[str, _State] = {}

    def negotiates(self, request: NegotiateRequest, now_s: float) -> None:
        """A receiver says who it is, what it holds and what it takes."""
        state = self._state(request.receiver)
        state.site, state.serving_address = request.site, request.serving_address
        state.takes_deltas = TRANSFER_FORMAT_DELTA in request.formats
        state.held_version = request.held_weight_version if request.HasField("held_weight_version") else None
        state.heard_s = now_s

    def negotiated(self, receiver: str, weight_version: int, now_s: float) -> None:
        """The receiver has a plan to fetch a version."""
        self._state(receiver).expected_until_s[weight_version] = now_s + FETCH_GRACE_S

    def fetch_began(self, receiver: str, weight_version: int) -> bool:
        """A fetch begins.

        Returns:
            Whether this receiver was sent the whole version before and has not acknowledged it: perhaps it did not
            like what it got.
        """
        state = self._state(receiver)
        state.fetching[weight_version] += 1
        return weight_version in state.sent_whole

    def fetch_ended(self, receiver: str, weight_version: int, *, to_the_end: bool, now_s: float) -> None:
        """A fetch ended, with its last byte sent or before."""
        state = self._state(receiver)
        state.heard_s = now_s
        state.fetching[weight_version] -= 1
        if state.fetching[weight_version] == 0:
            del state.fetching[weight_version]
        state.expected_until_s[weight_version] = now_s + FETCH_GRACE_S
        if to_the_end:
            state.sent_whole.add(weight_version)

    def acknowledged(self, request: AcknowledgeRequest, now_s: float) -> None:
        """The receiver has a version: it no longer needs those before it, and this one only as a base."""
        state = self._state(request.receiver)
        state.acknowledged = request
        state.held_version, state.heard_s = request.weight_version, now_s
        version = request.weight_version
        state.expected_until_s = {v: until_s for v, until_s in state.expected_until_s.items() if v > version}
        state.sent_whole = {v for v in state.sent_whole if v > version}

    def watch_began(self, watcher: str) -> None:
        """A watch is open: whoever watches is there."""
        self._state(watcher).num_watches += 1

    def watch_ended(self, watcher: str, now_s: float) -> None:
        state = self._state(watcher)
        state.num_watches -= 1
        state.heard_s = now_s

    def relays(self) -> list[Relay]:
        """Those that are there."""
        return [
            Relay(state.site, state.serving_address)
            for state in self._states.values()
            if state.serving_address and state.num_watches > 0
        ]

    def in_use(self, now_s: float) -> set[int]:
        """The versions that some receiver is fetching or may be about to, and those that it holds as a base."""
        versions: set[int] = set()
        for state in self._states.values():
            versions.update(state.fetching)
            versions.update(version for version, until_s in state.expected_until_s.items() if until_s > now_s)
            if state.held_version is not None and self._base_until_s(state) > now_s:
                versions.add(state.held_version)
        return versions

    def next_lapse_s(self, now_s: float) -> float | None:
        """When the next expected fetch is no longer expected, or the next base no longer kept; None when there are
        none, or only such as stay while somebody watches."""
        lapses = [
            until_s
            for state in self._states.values()
            for until_s in (*state.expected_until_s.values(), self._base_until_s(state))
            if now_s < until_s < float("inf")
        ]
        return min(lapses, default=None)

    def forget_version(self, weight_version: int) -> None:
        """The version is gone."""
        for state in self._states.values():
            state.expected_until_s.pop(weight_version, None)
            state.sent_whole.discard(weight_version)

    def to_proto(self) -> list[Receiver]:
        """Those that have acknowledged a version, by name."""
        return [
            Receiver(receiver=name, acknowledged=state.acknowledged, serving_address=state.serving_address)
            for name, state in sorted(self._states.items())
            if state.acknowledged is not None
        ]

    def _state(self, receiver: str) -> _State:
        return self._states.setdefault(receiver, _State())

    @staticmethod
    def _base_until_s(state: _State) -> float:
        if not state.takes_deltas:
            return 0.0
        return float("inf") if state.num_watches > 0 else state.heard_s + BASE_GRACE_S
