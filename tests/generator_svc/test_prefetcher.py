"""Fetches beside generation."""

import asyncio
from typing import Any

import pytest
import torch

from generator_svc.prefetcher import Prefetcher
from generator_svc.version_buffer import open_tensors
from generator_svc.weight_fetcher import FetchedVersion, WeightSource
from streamrl.adapters import merged_tensors
from streamrl.errors import WeightTransferError
from streamrl.v1.weights_pb2 import Adapter, VersionManifest

FIRST, SECOND = {"a": torch.zeros(100)}, {"a": torch.ones(100)}


def prefetcher_of(published: Any, **source: Any) -> Prefetcher:
    source = {"patience_s": 5.0, **source}
    return Prefetcher(WeightSource(published.address, "run", attempt=1, receiver="g", site="a", **source))


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


BASE = {"a": torch.randn(10, 6), "b": torch.randn(50)}


def adapters(published: Any, version: int, base: VersionManifest, rows: int = 10) -> VersionManifest:
    parts = {"a.lora_up": torch.full((rows, 2), float(version)), "a.lora_down": torch.ones(2, 6)}
    adapter = Adapter(base_weight_version=base.weight_version, base_digest=base.digest, scaling=0.5)
    manifest: VersionManifest = published.publish(version, parts, adapter=adapter)
    return manifest


def assert_makes(fetched: FetchedVersion, version: int) -> None:
    assert fetched.adapted is not None
    base = open_tensors(fetched.adapted.path, fetched.adapted.manifest)
    parts = open_tensors(fetched.buffer.path, fetched.manifest)
    scaling = fetched.manifest.adapter.scaling
    made = dict(merged_tensors(base, parts, scaling, torch.device("cpu")))
    torch.testing.assert_close(made["a"], BASE["a"] + version)
    assert torch.equal(made["b"], BASE["b"])
    fetched.close()


@pytest.mark.parametrize("source", [{}, {"keep_base": True}])
def test_what_adapters_are_added_to_comes_once(published: Any, source: dict[str, Any]) -> None:
    base = published.publish(0, BASE, is_base=True)
    versions = [adapters(published, version, base) for version in (1, 2)]

    async def main() -> None:
        # Of two instances the one begins with the base, and the other later.
        for begins_with_base in (True, False):
            prefetcher = prefetcher_of(published, **source)
            if begins_with_base:
                (await prefetcher.take(base)).close()
            for version, manifest in enumerate(versions, start=1):
                assert_makes(await prefetcher.take(manifest), version)
            assert published.num_fetches() == {0: 1, 1: 1, 2: 1}
            # A version that is off comes anew, with everything that it rests on.
            prefetcher.forget()
            assert_makes(await prefetcher.take(versions[1]), 2)
            assert published.num_fetches() == {0: 2, 1: 1, 2: 2}
            published.fetched.clear()
            prefetcher.close()

    asyncio.run(main())


def test_what_adapters_are_added_to_is_given_back_once_versions_come_whole(published: Any) -> None:
    base = published.publish(0, BASE, is_base=True)
    whole = published.publish(1, FIRST)

    async def main() -> None:
        prefetcher = prefetcher_of(published)
        for manifest in (base, whole):
            (await prefetcher.take(manifest)).close()
        assert prefetcher._adapted is None
        prefetcher.close()

    asyncio.run(main())


def test_adapters_that_cannot_be_added_are_no_version(published: Any) -> None:
    base = published.publish(0, BASE, is_base=True)
    other = published.publish(7, FIRST, is_base=True)
    unfit, gone = adapters(published, 1, base, rows=11), adapters(published, 2, other)
    other_base = published.publish(7, SECOND, is_base=True)
    assert other_base.digest != other.digest

    async def main() -> None:
        prefetcher = prefetcher_of(published, patience_s=0.1)
        with pytest.raises(WeightTransferError, match=r"version 1 cannot be made: a of shape \[10, 6\] has an adapter"):
            await prefetcher.take(unfit)
        with pytest.raises(WeightTransferError, match=f"it holds digest {other_base.digest} instead of"):
            await prefetcher.take(gone)
        prefetcher.close()

    asyncio.run(main())


def test_closing_ends_what_is_on_its_way_for_adapters(published: Any) -> None:
    manifest = adapters(published, 1, published.publish(0, BASE, is_base=True))
    published.gate.clear()

    async def main() -> None:
        prefetcher = prefetcher_of(published)
        waiting = asyncio.create_task(prefetcher.take(manifest))
        await asyncio.to_thread(published.waiting.wait, 20.0)
        prefetcher.close()
        with pytest.raises(WeightTransferError):
            await waiting

    asyncio.run(main())
    assert published.num_fetches() == {1: 1}


def test_what_adapters_are_added_to_is_waited_for(published: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    base = published.publish(0, BASE, is_base=True)
    manifest = adapters(published, 1, base)
    published.forget(0)

    async def main() -> None:
        prefetcher = prefetcher_of(published)
        waiting = asyncio.create_task(prefetcher.take(manifest))
        while not waiting.done() and "version 0 is not held" not in caplog.text:  # noqa: ASYNC110  (what it looks at has no events)
            await asyncio.sleep(0.01)
        published.publish(0, BASE, is_base=True)
        assert_makes(await waiting, 1)
        prefetcher.close()

    asyncio.run(main())


def test_adapters_may_be_retired_while_what_they_are_added_to_comes(published: Any) -> None:
    manifest = adapters(published, 1, published.publish(0, BASE, is_base=True))

    class Fetched(list[int]):
        def append(self, weight_version: int) -> None:
            super().append(weight_version)
            if weight_version == 0:
                published.forget(1)

    published.fetched = Fetched()

    async def main() -> None:
        prefetcher = prefetcher_of(published)
        assert_makes(await prefetcher.take(manifest), 1)
        prefetcher.close()

    asyncio.run(main())
