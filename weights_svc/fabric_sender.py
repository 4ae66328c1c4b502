"""Sends versions to all receivers of one fabric at once: rank 0 of their group, and the clock of their rendezvous.

The data comes from the file that every other receiver is served from, so nothing depends on a broadcast: what one does
not deliver is fetched.
"""

import asyncio
import logging
from collections.abc import Collection

from streamrl.errors import FabricError
from streamrl.fabric.member import MAX_FAILURES, FabricMember
from streamrl.fabric.regions import tensor_regions
from streamrl.v1.weights_pb2 import FabricGroup
from weights_svc.ledger import Ledger
from weights_svc.negotiate import FabricOffer
from weights_svc.rendezvous import Membership, Rendezvous
from weights_svc.store import StoredVersion

logger = logging.getLogger(__name__)

GATHER_S = 3.0
"""A gathering is closed so long after the first has come, or when all have: they hear of a version at the same time."""


class FabricSender:
    """Belongs to one event loop, on the main thread."""

    def __init__(self, fabric: str, site: str, member: FabricMember, ledger: Ledger) -> None:
        self._fabric = fabric
        self._site = site
        self._member = member
        self._ledger = ledger
        self._rendezvous = Rendezvous()
        self._unique_id = b""
        self._answer: asyncio.Future[tuple[Membership, bytes] | None] | None = None
        self._closing: asyncio.TimerHandle | None = None
        self._sending: asyncio.Task[None] | None = None
        member.start()

    def offer(self, weight_versions: Collection[int]) -> FabricOffer | None:
        """What can be sent now.

        Args:
            weight_versions: those that are here whole.
        """
        if self._rendezvous.num_failures >= MAX_FAILURES:
            return None
        if not self._member.ready:
            self._member.start()
            return None
        return FabricOffer(self._fabric, self._site, frozenset(weight_versions))

    async def place(self, receiver: str, held_group: bytes, stored: StoredVersion) -> FabricGroup | None:
        """The receiver's place in the group that will be sent the version; None: it takes the ordinary way. Waits for
        the others, for `GATHER_S` at most.

        Args:
            held_group: the unique id of the group that it is in; empty: none.
        """
        version = stored.weight_version, stored.manifest.digest
        in_group = held_group != b"" and held_group == self._unique_id
        if not self._rendezvous.come(receiver, version, in_group=in_group):
            return None
        if self._answer is None:
            loop = asyncio.get_running_loop()
            self._answer = loop.create_future()
            self._closing = loop.call_later(GATHER_S, self._close, stored)
        answer = self._answer
        if self._rendezvous.complete:
            self._close(stored)
        try:
            group = await asyncio.shield(answer)
        except asyncio.CancelledError:
            if not answer.done() and self._answer is answer:
                self._rendezvous.withdraw(receiver)
            raise
        if group is None:
            return None
        membership, unique_id = group
        return FabricGroup(unique_id=unique_id, rank=membership.rank(receiver), world_size=membership.world_size)

    def left(self, unique_id: bytes) -> None:
        """A member has given the group up: what is being sent in it would wait for that one."""
        if unique_id == self._unique_id:
            self._member.kill()
            if not self._rendezvous.moving:
                self._failed()

    async def close(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
        self._member.kill()
        if self._sending is not None:
            await asyncio.gather(self._sending, return_exceptions=True)

    def _close(self, stored: StoredVersion) -> None:
        """Closes the gathering and answers all who came."""
        answer, self._answer = self._answer, None
        assert answer is not None and self._closing is not None
        self._closing.cancel()
        membership = self._rendezvous.close()
        if membership is None:
            logger.debug("version=%d takes the ordinary way: not everybody has come", stored.weight_version)
            answer.set_result(None)
        else:
            self._sending = asyncio.create_task(self._send(stored, membership, answer))

    async def _send(
        self,
        stored: StoredVersion,
        membership: Membership,
        answer: "asyncio.Future[tuple[Membership, bytes] | None]",
    ) -> None:
        version = stored.weight_version
        try:
            if membership != self._rendezvous.group or self._member.group != self._unique_id:
                self._unique_id = await asyncio.to_thread(self._member.mint)
                logger.info("a new group on %s: %s", self._fabric, ", ".join(membership.members))
            answer.set_result((membership, self._unique_id))
            await asyncio.to_thread(self._member.join, self._unique_id, 0, membership.world_size)
            regions = tensor_regions(stored.manifest, stored.positions)
            await asyncio.to_thread(self._member.move, str(stored.path), regions)
        except FabricError as error:
            logger.warning("version=%d takes the ordinary way, and not that of %s: %s", version, self._fabric, error)
            if not answer.done():
                answer.set_result(None)
            self._failed()
        else:
            self._rendezvous.moved(membership)
            num_bytes = stored.manifest.num_bytes
            self._ledger.count_traffic(bytes_full=num_bytes * len(membership.members), bytes_sent=num_bytes)
            self._ledger.save_traffic()
            logger.info("version=%d is sent to %d receivers at once", version, len(membership.members))

    def _failed(self) -> None:
        self._rendezvous.failed()
        self._unique_id = b""
        if self._rendezvous.num_failures >= MAX_FAILURES:
            self._member.kill()
            logger.warning("nothing more is sent over %s: %d groups in a row failed", self._fabric, MAX_FAILURES)
        else:
            self._member.start()
