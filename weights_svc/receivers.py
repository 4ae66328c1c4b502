"""Who is fetching what, and what each receiver last loaded. No clock and no gRPC: times come as arguments."""

from collections import Counter
from dataclasses import dataclass, field

from streamrl.v1.weights_pb2 import AcknowledgeRequest, Receiver

FETCH_GRACE_S = 60.0
"""A version stays for a receiver that has negotiated it, or whose fetch has ended, for this long without an
acknowledgement: time to begin, or to go on after a break."""


@dataclass(slots=True)
class _State:
    acknowledged: AcknowledgeRequest | None = None
    fetching: Counter[int] = field(default_factory=Counter)
    expected_until_s: dict[int, float] = field(default_factory=dict)
    sent_whole: set[int] = field(default_factory=set)


class Receivers:
    """All receivers that this service has met."""

    def __init__(self) -> None:
        self._states: dict[str, _State] = {}

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
        state.fetching[weight_version] -= 1
        if state.fetching[weight_version] == 0:
            del state.fetching[weight_version]
        state.expected_until_s[weight_version] = now_s + FETCH_GRACE_S
        if to_the_end:
            state.sent_whole.add(weight_version)

    def acknowledged(self, request: AcknowledgeRequest) -> None:
        """The receiver runs a version: it no longer needs this one or those before it."""
        state = self._state(request.receiver)
        state.acknowledged = request
        version = request.weight_version
        state.expected_until_s = {v: until_s for v, until_s in state.expected_until_s.items() if v > version}
        state.sent_whole = {v for v in state.sent_whole if v > version}

    def in_use(self, now_s: float) -> set[int]:
        """The versions that some receiver is fetching or may be about to."""
        versions: set[int] = set()
        for state in self._states.values():
            versions.update(state.fetching)
            versions.update(version for version, until_s in state.expected_until_s.items() if until_s > now_s)
        return versions

    def next_lapse_s(self, now_s: float) -> float | None:
        """When the next expected fetch is no longer expected; None when none is expected."""
        lapses = [
            until_s for state in self._states.values() for until_s in state.expected_until_s.values() if until_s > now_s
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
            Receiver(receiver=name, acknowledged=state.acknowledged)
            for name, state in sorted(self._states.items())
            if state.acknowledged is not None
        ]

    def _state(self, receiver: str) -> _State:
        return self._states.setdefault(receiver, _State())
