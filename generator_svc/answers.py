"""What an instance still has to tell the scheduler about samples, kept until the scheduler has heard it."""

from collections.abc import Iterable
from dataclasses import dataclass

from generator_svc.answer_prefix import Prefix
from streamrl.identity import SampleKey
from streamrl.v1.scheduler_pb2 import GivenBack, HeartbeatRequest

_MOST_PREFIXES = 64
"""Of answers that were handed over, remembered for a scheduler that asks again: the first answer may be lost."""
_MOST_TOKENS = 2_000_000
"""Of the answers that go along with one heartbeat: some 15 MB, where gRPC takes 64."""


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
        self._prefixes: dict[_Dispatch, Prefix] = {}

    def given_back(self, key: SampleKey, dispatch: int, prefix: Prefix | None = None) -> None:
        """A sample will not be sent by this instance.

        Args:
            prefix: with which it goes on elsewhere; None: as said before of this dispatch, or it begins anew.
        """
        stay = _Dispatch(key, dispatch)
        self._given_back[stay] = None
        if prefix:
            self._prefixes[stay] = prefix

    def not_revoked(self, keys: Iterable[SampleKey]) -> None:
        """These were on their way already."""
        self._not_revoked.update(dict.fromkeys(keys))

    def write_to(self, request: HeartbeatRequest) -> bool:
        """Puts all that fits into a heartbeat that is sent now.

        Returns:
            Whether some are left for another one.
        """
        fitting: list[_Dispatch] = []
        num_tokens = 0
        for stay in self._given_back:
            num_tokens += len(self._prefixes.get(stay, ()))
            if fitting and num_tokens > _MOST_TOKENS:
                break
            fitting.append(stay)
        request.revoked.extend(self._proto(stay) for stay in fitting)
        request.not_revoked.extend(key.to_proto() for key in self._not_revoked)
        self._sent[0].extend(fitting)
        self._sent[1].extend(self._not_revoked)
        for stay in fitting:
            del self._given_back[stay]
        self._not_revoked = {}
        return bool(self._given_back)

    def heard(self) -> None:
        """The scheduler answered."""
        self._sent = ([], [])
        said = [stay for stay in self._prefixes if stay not in self._given_back]
        for stay in said[:-_MOST_PREFIXES]:
            del self._prefixes[stay]

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
