"""Watchers hear of every version."""

import asyncio

import pytest

from streamrl.errors import UnavailableError
from streamrl.v1.weights_pb2 import VersionManifest
from weights_svc.announcements import Announcements


def manifest(weight_version: int) -> VersionManifest:
    return VersionManifest(weight_version=weight_version, digest=f"d{weight_version}", attempt=1)


def test_a_watcher_gets_the_newest_at_once_and_then_each_later_one_however_slow_it_is():
    async def scenario() -> None:
        announcements = Announcements()
        watch = announcements.watch(manifest(3))
        assert (await anext(watch)).weight_version == 3
        announcements.announce(manifest(4))
        announcements.announce(manifest(5))
        assert [(await anext(watch)).weight_version for _ in range(2)] == [4, 5]
        await watch.aclose()

    asyncio.run(scenario())


def test_closing_ends_every_watch():
    async def scenario() -> None:
        announcements = Announcements()
        waiting = [asyncio.create_task(anext(announcements.watch(None))) for _ in range(2)]
        await asyncio.sleep(0)
        announcements.close()
        for task in waiting:
            with pytest.raises(UnavailableError, match="ending"):
                await task
        with pytest.raises(UnavailableError):
            await anext(announcements.watch(None))

    asyncio.run(scenario())
