"""What an instance still has to tell the scheduler about samples, kept until the scheduler has heard it."""

from collections.abc import Iterable

from streamrl.identity import SampleKey
from streamrl.v1.scheduler_pb2 import HeartbeatRequest


class Answers:
    """Answers go with the next heartbeat. Those of a stream that breaks before an answer comes go again with the next
    one: twice is harmless, never is not."""

    def __init__(self) -> None:
        self._revoked: dict[SampleKey, None] = {}
        self._not_revoked: dict[SampleKey, None] = {}
        self._sent: tuple[list[SampleKey], list[SampleKey]] = ([], [])

    def revoked(self, keys: Iterable[SampleKey]) -> None:
        """These will not be sent by this instance."""
        self._revoked.update(dict.fromkeys(keys))

    def not_revoked(self, keys: Iterable[SampleKey]) -> None:
        """These were on their way already."""
        self._not_revoked.update(dict.fromkeys(keys))

    def write_to(self, request: HeartbeatRequest) -> None:
        """Puts all of them into a heartbeat that is sent now."""
        request.revoked.extend(key.to_proto() for key in self._revoked)
        request.not_revoked.extend(key.to_proto() for key in self._not_revoked)
        self._sent[0].extend(self._revoked)
        self._sent[1].extend(self._not_revoked)
        self._revoked, self._not_revoked = {}, {}

    def heard(self) -> None:
        """The scheduler answered."""
        self._sent = ([], [])

    def not_heard(self) -> None:
        """The stream broke."""
        revoked, not_revoked = self._sent
        self.revoked(revoked)
        self.not_revoked(not_revoked)
        self._sent = ([], [])

    def clear(self) -> None:
        """Another incarnation begins: what the earlier one had is nobody's business any more."""
        self._revoked, self._not_revoked, self._sent = {}, {}, ([], [])
