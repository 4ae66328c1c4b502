"""What an instance still has to tell the scheduler about samples, kept until the scheduler has heard it."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from generator_svc.answer_prefix import Prefix
from streamrl.identity import SampleKey
from streamrl.v1.scheduler_pb2 import GivenBack, HeartbeatRequest

_MOST_PREFIXES = 256
"""Of answers that were handed over, remembered for a scheduler that asks again: the first answer may be lost."""


@dataclass(frozen=True, slots=True)
class _Dispatch:
    """One stay of a sample on this instance."""

    key: SampleKey
    dispatch: int


class Answers:
    """Answers go with the next heartbeat. Those of a stream that breaks before an answer comes go again with the next
    one: twice is harmless, never is not."""

    def __init__(self) -> None:
        self._given_back: dict[_Dispatch, None] = {}
        self._not_revoked: dict[SampleKey, None] = {}
        self._sent: tuple[list[_Dispatch], list[SampleKey]] = ([], [])
        self._prefixes: OrderedDict[_Dispatch, Prefix] = OrderedDict()

    def given_back(self, key: SampleKey, dispatch: int, prefix: Prefix | None = None) -> None:
        """A sample will not be sent by this instance.

        Args:
            prefix: with which it goes on elsewhere; None: as said before of this dispatch, or it begins anew.
        """
        stay = _Dispatch(key, dispatch)
        self._given_back[stay] = None
        if prefix:
            self._prefixes[stay] = prefix
            if len(self._prefixes) > _MOST_PREFIXES:
                self._prefixes.popitem(last=False)

    def not_revoked(self, keys: Iterable[SampleKey]) -> None:
        """These were on their way already."""
        self._not_revoked.update(dict.fromkeys(keys))

    def write_to(self, request: HeartbeatRequest) -> None:
        """Puts all of them into a heartbeat that is sent now."""
        request.revoked.extend(self._proto(stay) for stay in self._given_back)
        request.not_revoked.extend(key.to_proto() for key in self._not_revoked)
        self._sent[0].extend(self._given_back)
        self._sent[1].extend(self._not_revoked)
        self._given_back, self._not_revoked = {}, {}

    def heard(self) -> None:
        """The scheduler answered."""
        self._sent = ([], [])

    def not_heard(self) -> None:
        """The stream broke."""
        given_back, not_revoked = self._sent
        self._given_back.update(dict.fromkeys(given_back))
        self.not_revoked(not_revoked)
        self._sent = ([], [])

    def clear(self) -> None:
        """Another incarnation begins: what the earlier one had is nobody's business any more."""
        self._given_back, self._not_revoked, self._sent = {}, {}, ([], [])
        self._prefixes.clear()

    def _proto(self, stay: _Dispatch) -> GivenBack:
        prefix = self._prefixes.get(stay)
        return GivenBack(
            id=stay.key.to_proto(), dispatch=stay.dispatch, prefix=None if prefix is None else prefix.to_proto()
        )
