import asyncio

import pytest

from generator_svc.patience import patiently
from streamrl.errors import RefusedError, UnavailableError


class Peer:
    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0

    async def ask(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


def test_a_peer_that_comes_back_is_asked_again() -> None:
    peer = Peer(UnavailableError("gone"), UnavailableError("still gone"))
    assert asyncio.run(patiently(peer.ask, patience_s=10)) == "answer"
    assert peer.calls == 3


def test_patience_ends_with_the_last_error() -> None:
    peer = Peer(*(UnavailableError(f"gone {count}") for count in range(100)))
    with pytest.raises(UnavailableError, match="gone"):
        asyncio.run(patiently(peer.ask, patience_s=0.3))
    assert 1 < peer.calls < 5


def test_a_refusal_is_not_asked_again() -> None:
    peer = Peer(RefusedError("no"))
    with pytest.raises(RefusedError):
        asyncio.run(patiently(peer.ask, patience_s=10))
    assert peer.calls == 1
