"""Versions that come to several instances in one broadcast, or by the ordinary way when one of them does not take part.

A real weights_svc and the real fetch, with a network on loopback in the place of NCCL.
"""

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from generator_svc.fabric_receiver import FabricReceiver
from generator_svc.prefetcher import Prefetcher
from generator_svc.weight_fetcher import FetchedVersion, WeightFetch, WeightSource
from streamrl.errors import WeightTransferError
from streamrl.fabric import member
from streamrl.fabric.member import FabricMember
from tests.weights_svc.running_service import RUN_ID, RunningService, content_of, make_data, wait_until
from weights_svc import fabric_sender

LOOPBACK = (sys.executable, str(Path(__file__).parents[1] / "streamrl" / "fabric" / "loopback_network.py"))
NUM_BYTES = 5000


@pytest.fixture
def senders(monkeypatch: pytest.MonkeyPatch) -> list[FabricMember]:
    """The places of the services on the fabric."""
    made: list[FabricMember] = []

    def make(command: Sequence[str]) -> FabricMember:
        made.append(FabricMember(command))
        return made[-1]

    monkeypatch.setattr(member, "FabricMember", make)
    return made


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, senders: list[FabricMember]) -> Iterator[RunningService]:
    monkeypatch.setattr(fabric_sender, "GATHER_S", 0.3)
    running = RunningService(tmp_path, fabric="ib0", site="west", member_command=LOOPBACK, keep_versions=10)
    yield running
    running.stop()


class Instances:
    """Instances on the fabric, each with its own place there."""

    def __init__(self, service: RunningService, senders: list[FabricMember], *flaws: str) -> None:
        self._service = service
        self._senders = senders
        self.receivers = [FabricReceiver(FabricMember((*LOOPBACK, flaw))) for flaw in flaws]
        self.ready()

    def ready(self) -> None:
        for receiver in self.receivers:
            receiver.start()
        wait_until(lambda: all(place.ready for place in (*self.receivers, *self._senders)))

    def fetch(self, version: int) -> list[list[bytes]]:
        """What each has of a version then."""
        digest = self._service.publish(version)
        manifest = self._service.negotiate(exact_weight_version=version).manifest
        assert manifest.digest == digest
        contents: list[list[bytes]] = [[] for _ in self.receivers]

        def fetch(index: int) -> None:
            source = WeightSource(self._service.address, RUN_ID, 1, f"generator-{index}", "west", fabric="ib0")
            contents[index] = taken(WeightFetch(source, manifest, fabric=self.receivers[index]).run())

        threads = [threading.Thread(target=fetch, args=(index,)) for index in range(len(self.receivers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return contents

    def fetch_until_at_once(self, version: int) -> int:
        """Fetches versions from this one on until one comes to all in one broadcast: on a machine that is busy some may
        come too late for the first.

        Returns:
            The version after it.
        """
        for attempt in range(version, version + 10):
            full, sent = traffic(self._service)
            assert self.fetch(attempt) == len(self.receivers) * [make_data(attempt)]
            full += len(self.receivers) * NUM_BYTES
            wait_until(lambda full=full: traffic(self._service)[0] == full)
            if traffic(self._service)[1] == sent + NUM_BYTES:
                return attempt + 1
        raise AssertionError("no version came to all at once")

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.close()


@pytest.fixture
def instances(service: RunningService, senders: list[FabricMember]) -> Iterator[Callable[..., Instances]]:
    made = []

    def make(*flaws: str) -> Instances:
        made.append(Instances(service, senders, *flaws))
        return made[-1]

    yield make
    for some in made:
        some.close()


def taken(fetched: FetchedVersion) -> list[bytes]:
    content = content_of(fetched.buffer)
    fetched.buffer.close()
    return content


def traffic(service: RunningService) -> tuple[int, int]:
    listed = service.list_versions()
    return listed.bytes_full, listed.bytes_sent


def has_given_up(caplog: pytest.LogCaptureFixture) -> bool:
    return "nothing more is sent over ib0: 3 groups in a row failed" in caplog.text


def test_versions_come_to_all_at_once_and_one_that_joins_or_is_started_anew_is_of_a_later_group(
    service: RunningService, instances: Callable[..., Instances]
):
    some = instances("", "")
    version = some.fetch_until_at_once(0)
    version = some.fetch_until_at_once(version)
    some.receivers += instances("").receivers
    version = some.fetch_until_at_once(version)
    some.receivers[0].close()
    some.ready()
    some.fetch_until_at_once(version)


def test_one_that_is_gone_makes_the_others_fetch_and_then_a_group_of_their_own(
    service: RunningService, instances: Callable[..., Instances]
):
    some = instances("", "", "")
    version = some.fetch_until_at_once(0)
    some.receivers.pop().close()
    assert some.fetch_until_at_once(version) >= version + 3


@pytest.mark.parametrize("flaw, what", [("damaging", "arrived with digest"), ("dying", "the member process ended")])
def test_what_arrives_damaged_or_in_part_is_fetched_and_the_group_given_up(
    service: RunningService,
    instances: Callable[..., Instances],
    caplog: pytest.LogCaptureFixture,
    flaw: str,
    what: str,
):
    flawed = instances(flaw)
    assert flawed.fetch(0) == [make_data(0)]
    assert "version=0 does not come over ib0, fetching it" in caplog.text
    assert what in caplog.text
    assert flawed.receivers[0].group == b""


def test_when_one_does_not_join_all_fetch_and_soon_nothing_more_is_tried(
    service: RunningService,
    instances: Callable[..., Instances],
    senders: list[FabricMember],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setattr(member, "MEET_S", 0.5)
    both = instances("", "deaf")
    version = 0
    while not has_given_up(caplog):
        assert both.fetch(version) == 2 * [make_data(version)]
        version += 1
        assert traffic(service) == (version * 2 * NUM_BYTES, version * 2 * NUM_BYTES)
        for receiver in both.receivers:
            receiver.start()
        for place in (*both.receivers, *senders):
            wait_until(lambda place=place: place.ready or has_given_up(caplog))
    assert both.fetch(version) == 2 * [make_data(version)]


def test_a_fetch_that_waits_for_its_group_can_be_cancelled(
    service: RunningService, instances: Callable[..., Instances], caplog: pytest.LogCaptureFixture
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
    # What comes next tells weights_svc, which does not wait there for long.
    service.publish(1)
    manifest = service.negotiate(exact_weight_version=1).manifest
    assert taken(WeightFetch(source, manifest, fabric=receiver).run()) == make_data(1)
    wait_until(lambda: "asked to join, the member process ended" in caplog.text)


def test_a_prefetcher_that_cannot_take_part_fetches(service: RunningService):
    async def main() -> list[bytes]:
        source = WeightSource(service.address, RUN_ID, 1, "generator-0", "west", fabric="ib0")
        prefetcher = Prefetcher(source, FabricReceiver(FabricMember((*LOOPBACK, "blind"))))
        service.publish(0)
        fetched = await prefetcher.take(service.negotiate(exact_weight_version=0).manifest)
        prefetcher.close()
        return taken(fetched)

    assert asyncio.run(main()) == make_data(0)
    assert traffic(service) == (NUM_BYTES, NUM_BYTES)
