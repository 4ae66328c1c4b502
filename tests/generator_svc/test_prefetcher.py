"""Fetches beside generation."""

import asyncio
from typing import Any

import pytest
import torch

from generator_svc.prefetcher import Prefetcher
from generator_svc.version_buffer import open_tensors
from generator_svc.weight_fetcher import FetchedVersion, WeightSource
from streamrl.errors import WeightTransferError

FIRST, SECOND = {"a": torch.zeros(100)}, {"a": torch.ones(100)}


def prefetcher_of(published: Any) -> Prefetcher:
    return Prefetcher(WeightSource(published.address, "run", attempt=1, receiver="g", site="a", patience_s=5.0))


def only_tensor(fetched: FetchedVersion) -> torch.Tensor:
    ((_, tensor),) = open_tensors(fetched.buffer.path, fetched.manifest)
    fetched.buffer.close()
    return tensor


def test_a_version_is_fetched_once_however_often_it_is_asked_for(published: Any) -> None:
    manifest = published.publish(1, FIRST)

    async def main() -> None:
        prefetcher = prefetcher_of(published)
        prefetcher.begin(manifest)
        prefetcher.begin(manifest)
        assert torch.equal(only_tensor(await prefetcher.take(manifest)), FIRST["a"])
        prefetcher.close()

    asyncio.run(main())
    assert published.positions == [(0, 0)]


def test_another_version_takes_the_place_of_the_one_on_its_way(published: Any) -> None:
    first, second = published.publish(1, FIRST), published.publish(2, SECOND)
    published.gate.clear()

    async def main() -> None:
        prefetcher = prefetcher_of(published)
        waiting = asyncio.create_task(prefetcher.take(first))
        await asyncio.to_thread(published.waiting.wait, 20.0)
        prefetcher.begin(second)
        published.gate.set()
        with pytest.raises(WeightTransferError):
            await waiting
        assert torch.equal(only_tensor(await prefetcher.take(second)), SECOND["a"])
        prefetcher.close()

    asyncio.run(main())


def test_a_version_with_the_weights_of_the_one_before_is_another_version(published: Any) -> None:
    first, second = published.publish(1, FIRST), published.publish(2, FIRST)
    assert first.digest == second.digest

    async def main() -> None:
        prefetcher = prefetcher_of(published)
        prefetcher.begin(first)
        fetched = await prefetcher.take(second)
        assert fetched.manifest.weight_version == 2
        assert torch.equal(only_tensor(fetched), FIRST["a"])
        prefetcher.close()

    asyncio.run(main())


def test_what_failed_is_tried_anew(published: Any) -> None:
    manifest = published.publish(1, FIRST)
    published.corrupt_tensor = 0

    async def main() -> None:
        prefetcher = prefetcher_of(published)
        with pytest.raises(WeightTransferError):
            await prefetcher.take(manifest)
        published.corrupt_tensor = None
        assert torch.equal(only_tensor(await prefetcher.take(manifest)), FIRST["a"])
        prefetcher.close()

    asyncio.run(main())


def test_who_stops_waiting_leaves_the_fetch_to_the_next(published: Any) -> None:
    manifest = published.publish(1, FIRST)
    published.gate.clear()

    async def main() -> None:
        prefetcher = prefetcher_of(published)
        waiting = asyncio.create_task(prefetcher.take(manifest))
        await asyncio.to_thread(published.waiting.wait, 20.0)
        waiting.cancel()
        await asyncio.wait([waiting])
        published.gate.set()
        assert torch.equal(only_tensor(await prefetcher.take(manifest)), FIRST["a"])
        prefetcher.close()

    asyncio.run(main())
    assert published.positions == [(0, 0)]


def test_closing_ends_what_is_on_its_way(published: Any) -> None:
    manifest = published.publish(1, FIRST)
    published.gate.clear()

    async def main() -> None:
        prefetcher = prefetcher_of(published)
        waiting = asyncio.create_task(prefetcher.take(manifest))
        await asyncio.to_thread(published.waiting.wait, 20.0)
        prefetcher.close()
        with pytest.raises(WeightTransferError):
            await waiting

    asyncio.run(main())
