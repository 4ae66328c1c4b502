"""Versions that come to several instances in one broadcast, or by the ordinary way when one of them does not take part.

A real weights_svc and the real fetch, with a network on loopback in the place of NCCL.
"""

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from generator_svc.fabric_receiver import FabricReceiver
from generator_svc.prefetcher import Prefetcher
from generator_svc.weight_fetcher import FetchedVersion, WeightFetch, WeightSource
from streamrl.errors import WeightTransferError
from streamrl.fabric import member
from streamrl.fabric.member import FabricMember
from tests.weights_svc.running_service import RUN_ID, RunningService, make_data, wait_until
from weights_svc import fabric_sender

LOOPBACK = (sys.executable, str(Path(__file__).parents[1] / "streamrl" / "fabric" / "loopback_network.py"))
NUM_BYTES = 5000


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningService]:
    monkeypatch.setattr(fabric_sender, "GATHER_S", 0.3)
    running = RunningService(tmp_path, fabric="ib0", site="west", member_command=LOOPBACK, keep_versions=10)
    yield running
    running.stop()


class Instances:
    """Instances on the fabric, each with its own place there."""

    def __init__(self, service: RunningService, *flaws: str) -> None:
        self._service = service
        self.receivers = [FabricReceiver(FabricMember((*LOOPBACK, flaw))) for flaw in flaws]
        self.ready()

    def ready(self) -> None:
        for receiver in self.receivers:
            receiver.start()
        wait_until(lambda: all(receiver.ready for receiver in self.receivers))
        time.sleep(0.1)

    def fetch(self, version: int) -> list[list[bytes]]:
        """What each has of a version then."""
        digest = self._service.publish(version)
        manifest = self._service.negotiate(exact_weight_version=version).manifest
        assert manifest.digest == digest
        contents: list[list[bytes]] = [[] for _ in self.receivers]

        def fetch(index: int) -> None:
            source = WeightSource(self._service.address, RUN_ID, 1, f"generator-{index}", "west", fabric="ib0")
            contents[index] = content_of(WeightFetch(source, manifest, fabric=self.receivers[index]).run())

        threads = [threading.Thread(target=fetch, args=(index,)) for index in range(len(self.receivers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return contents

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.close()


@pytest.fixture
def instances(service: RunningService) -> Iterator[Callable[..., Instances]]:
    made = []

    def make(*flaws: str) -> Instances:
        made.append(Instances(service, *flaws))
        return made[-1]

    yield make
    for some in made:
        some.close()


def content_of(fetched: FetchedVersion) -> list[bytes]:
    content = []
    for index in range(len(fetched.manifest.tensors)):
        with fetched.buffer.tensor_bytes(index) as data:
            content.append(bytes(data))
    fetched.buffer.close()
    return content


def traffic(service: RunningService) -> tuple[int, int]:
    listed = service.list_versions()
    return listed.bytes_full, listed.bytes_sent


def test_versions_come_to_all_at_once(service: RunningService, instances: Callable[..., Instances]):
    both = instances("", "")
    for version in range(3):
        assert both.fetch(version) == 2 * [make_data(version)]
        wait_until(lambda sent=version + 1: traffic(service) == (2 * sent * NUM_BYTES, sent * NUM_BYTES))


def test_what_arrives_damaged_is_fetched_and_the_group_given_up(
    service: RunningService, instances: Callable[..., Instances], caplog: pytest.LogCaptureFixture
):
    both = instances("", "damaging")
    assert both.fetch(0) == 2 * [make_data(0)]
    assert "arrived with digest" in caplog.text
    assert traffic(service) == (3 * NUM_BYTES, 2 * NUM_BYTES)


def test_when_one_does_not_join_all_fetch(
    service: RunningService,
    instances: Callable[..., Instances],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(member, "MEET_S", 0.5)
    both = instances("", "deaf")
    for version in range(2):
        both.ready()
        assert both.fetch(version) == 2 * [make_data(version)]
        assert traffic(service) == ((version + 1) * 2 * NUM_BYTES, (version + 1) * 2 * NUM_BYTES)


def test_one_that_is_gone_makes_the_others_fetch_and_then_a_group_of_their_own(
    service: RunningService, instances: Callable[..., Instances]
):
    some = instances("", "", "")
    assert some.fetch(0) == 3 * [make_data(0)]
    wait_until(lambda: traffic(service) == (3 * NUM_BYTES, NUM_BYTES))
    some.receivers.pop().close()
    for version in (1, 2, 3):
        assert some.fetch(version) == 2 * [make_data(version)]
    wait_until(lambda: traffic(service) == ((3 + 6) * NUM_BYTES, (1 + 4 + 1) * NUM_BYTES))


def test_a_fetch_that_waits_for_its_group_can_be_cancelled(
    service: RunningService, instances: Callable[..., Instances]
):
    (receiver,) = instances("deaf").receivers
    service.publish(0)
    manifest = service.negotiate(exact_weight_version=0).manifest
    source = WeightSource(service.address, RUN_ID, 1, "generator-0", "west", fabric="ib0")
    fetch = WeightFetch(source, manifest, fabric=receiver)
    timer = threading.Timer(1.0, fetch.cancel)
    timer.start()
    with pytest.raises(WeightTransferError, match="cancelled"):
        fetch.run()


def test_a_prefetcher_that_cannot_take_part_fetches(service: RunningService):
    async def main() -> list[bytes]:
        source = WeightSource(service.address, RUN_ID, 1, "generator-0", "west", fabric="ib0")
        prefetcher = Prefetcher(source, FabricReceiver(FabricMember((*LOOPBACK, "blind"))))
        service.publish(0)
        fetched = await prefetcher.take(service.negotiate(exact_weight_version=0).manifest)
        prefetcher.close()
        return content_of(fetched)

    assert asyncio.run(main()) == make_data(0)
    assert traffic(service) == (NUM_BYTES, NUM_BYTES)
