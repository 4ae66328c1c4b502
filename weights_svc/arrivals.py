"""Versions that are still arriving at a relay, and are handed out meanwhile.

Each tensor can be read as soon as it is whole and has its digest, so that nothing unchecked is passed on. Everything
here belongs to one event loop.
"""

import asyncio

from streamrl.errors import UnavailableError
from streamrl.v1.weights_pb2 import VersionManifest
from weights_svc.store import StoredVersion


class Arrival:
    """One version on its way in."""

    def __init__(self, arriving: StoredVersion) -> None:
        """
        Args:
            arriving: its file is being written.
        """
        self.stored = arriving
        self._num_tensors = 0
        self._failure: str | None = None
        self._moved = asyncio.Event()

    @property
    def manifest(self) -> VersionManifest:
        return self.stored.manifest

    def has(self, tensor_index: int) -> bool:
        """Whether this tensor, and all before it, can be read."""
        return tensor_index < self._num_tensors

    def came(self, num_tensors: int) -> None:
        """So many tensors, the first ones, can be read."""
        if num_tensors > self._num_tensors:
            self._num_tensors = num_tensors
            self._move()

    def fail(self, reason: str) -> None:
        """The rest will not come."""
        self._failure = reason
        self._move()

    async def wait_for(self, tensor_index: int) -> None:
        """Waits until a tensor can be read.

        Raises:
            UnavailableError: it will not come.
        """
        while not self.has(tensor_index):
            if self._failure is not None:
                raise UnavailableError(
                    f"version {self.stored.weight_version} did not arrive whole: {self._failure}; negotiate again"
                )
            await self._moved.wait()

    def _move(self) -> None:
        """Wakes who waits."""
        self._moved.set()
        self._moved = asyncio.Event()


class Arrivals:
    """Those of this service, by weight version; an origin has none."""

    def __init__(self) -> None:
        self._arrivals: dict[int, Arrival] = {}
        self._next = asyncio.Event()

    def get(self, weight_version: int) -> Arrival | None:
        return self._arrivals.get(weight_version)

    def manifests(self) -> dict[int, VersionManifest]:
        """What is arriving."""
        return {version: arrival.manifest for version, arrival in self._arrivals.items()}

    def began(self, arrival: Arrival) -> None:
        self._arrivals[arrival.stored.weight_version] = arrival
        self._next.set()
        self._next = asyncio.Event()

    def ended(self, arrival: Arrival) -> None:
        """It is committed, or has failed."""
        if self._arrivals.get(arrival.stored.weight_version) is arrival:
            del self._arrivals[arrival.stored.weight_version]

    async def wait_for_next(self, timeout_s: float) -> None:
        """Waits until another version begins to arrive, or the time is over."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._next.wait()
        except TimeoutError:
            pass
