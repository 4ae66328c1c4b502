"""Relays: real services on loopback, one above the other, with lines between them that break."""

import contextlib
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from streamrl.digest import bytes_digest
from streamrl.v1.weights_pb2 import TRANSFER_FORMAT_DELTA, TRANSFER_FORMAT_FULL, Adapter, ModelFile
from tests.weights_svc.running_service import RunningService, wait_until
from tests.weights_svc.stubborn_line import Line
from weights_svc import relay_loop
from weights_svc.store import VersionStore

FILES = [ModelFile(name="config.json", content=b"{}")]
StartRelay = Callable[..., RunningService]


@pytest.fixture
def origin(tmp_path: Path) -> Iterator[RunningService]:
    origin = RunningService(tmp_path / "origin")
    yield origin
    origin.stop()


@pytest.fixture
def line(origin: RunningService) -> Iterator[Line]:
    """From the relay to the origin."""
    line = Line(origin.address)
    yield line
    line.close()


@pytest.fixture
def start_relay(origin: RunningService, line: Line, tmp_path: Path) -> Iterator[StartRelay]:
    relays: list[RunningService] = []

    def start(name: str = "west", **settings: object) -> RunningService:
        settings = {"upstream": line.address, "site": name, **settings}
        relays.append(RunningService(tmp_path / name, **settings))  # type: ignore[arg-type]
        return relays[-1]

    yield start
    for relay in reversed(relays):
        relay.stop()


def publish(service: RunningService, version: int, data: list[bytes] | None = None, attempt: int = 1) -> str:
    return service.publish(version, data, attempt=attempt, files=FILES)


def weights(version: int, num_items: int = 1000) -> list[bytes]:
    """Version 0 is noise; each version changes some items of it, and leaves others."""
    noise = random.Random(0)
    first, last = bytearray(noise.randbytes(4 * num_items)), bytearray(noise.randbytes(2 * num_items))
    for step in range(version):
        for place in range(step % 7, num_items, 40):
            first[4 * place] ^= 1
    return [bytes(first), b"", bytes(last)]


def assert_holds(relay: RunningService, version: int, num_items: int = 1000) -> None:
    wait_until(lambda: version in relay.versions())
    manifest = relay.negotiate(exact_weight_version=version).manifest
    assert relay.fetch_all(version, manifest.digest) == weights(version, num_items)


def flip_a_bit(service: RunningService, version: int, position: int = -100) -> None:
    (file,) = service.folder.glob(f"version-{version:08d}-*.safetensors")
    data = bytearray(file.read_bytes())
    data[position] ^= 4
    file.write_bytes(data)


def test_each_version_comes_once_and_later_ones_as_differences(origin, start_relay):
    publish(origin, 0, weights(0))
    relay = start_relay()
    for version in range(4):
        if version > 0:
            publish(origin, version, weights(version))
        for _receiver in range(3):
            assert_holds(relay, version)
    traffic = origin.list_versions()
    num_bytes = sum(map(len, weights(0)))
    assert traffic.bytes_full == 4 * num_bytes
    assert num_bytes < traffic.bytes_sent < 1.2 * num_bytes
    assert relay.list_versions().bytes_sent == 12 * num_bytes
    plan = relay.negotiate(with_files=True)
    assert list(plan.files) == FILES


def test_what_adapters_are_added_to_comes_once_and_before_them(origin, start_relay):
    base = origin.publish(0, weights(0, 10_000), files=FILES, is_base=True)
    adapter = Adapter(base_weight_version=0, base_digest=base, scaling=2.0)
    for version in range(1, 5):
        origin.publish(version, weights(version), adapter=adapter)
    relay = start_relay(keep_versions=2)
    wait_until(lambda: relay.versions() == [0, 4])
    assert relay.list_versions().versions[-1].adapter == adapter
    for version in range(5, 8):
        origin.publish(version, weights(version), adapter=adapter)
        wait_until(lambda version=version: version in relay.versions())
    relay.wait_for_versions([0, 6, 7])
    # The base, one version whole, and three differences.
    num_bytes = sum(map(len, weights(0)))
    assert 11 * num_bytes < origin.list_versions().bytes_sent < 11.5 * num_bytes
    # A relay in a new life, of which the base is damaged, takes that alone.
    relay.stop()
    flip_a_bit(relay, 0)
    relay.start()
    wait_until(lambda: _offered(relay, 0) == base)
    wait_until(lambda: relay.versions() == [0, 6, 7])
    assert relay.fetch_all(0, base) == weights(0, 10_000)


def _offered(relay: RunningService, weight_version: int) -> str | None:
    """Its digest; None while the relay asks to be asked again, as it does until it has looked at what it kept."""
    try:
        return relay.negotiate(exact_weight_version=weight_version).manifest.digest
    except grpc.RpcError as error:
        if error.code() != grpc.StatusCode.UNAVAILABLE:
            raise
        return None


def test_a_version_that_is_here_already_stays_when_it_becomes_what_adapters_are_added_to(origin, start_relay):
    base = publish(origin, 0, weights(0, 10_000))
    relay = start_relay(keep_versions=2)
    wait_until(lambda: relay.versions() == [0])
    publish(origin, 1, weights(1))
    wait_until(lambda: relay.versions() == [0, 1])
    origin.rewind(1, attempt=2)
    assert origin.publish(0, weights(0, 10_000), attempt=2, files=FILES, is_base=True) == base
    adapter = Adapter(base_weight_version=0, base_digest=base, scaling=2.0)
    for version in range(1, 5):
        origin.publish(version, weights(version), attempt=2, files=FILES, adapter=adapter)
        wait_until(lambda version=version: _acknowledged(origin).get("weights_svc@west") == version)
    relay.wait_for_versions([0, 3, 4])
    assert origin.list_versions().bytes_sent < 2 * sum(map(len, weights(0, 10_000)))


def test_an_anchor_comes_whole(origin, start_relay, tmp_path):
    second = RunningService(tmp_path / "second", anchor_every=2)
    try:
        relay = start_relay(upstream=second.address)
        for version in range(3):
            publish(second, version, weights(version))
            assert_holds(relay, version)
        num_bytes = sum(map(len, weights(0)))
        assert 2 * num_bytes < second.list_versions().bytes_sent < 2.5 * num_bytes
    finally:
        second.stop()


def test_a_version_is_handed_out_while_it_arrives(origin, line, start_relay):
    relay = start_relay()
    line.hold_after(300_000)
    digest = publish(origin, 0, weights(0, 100_000))
    line.wait_held()
    wait_until(lambda: _newest(relay) == 0)
    chunks = relay.fetch(0, digest)
    assert relay.versions() == []
    # 400,000 bytes of the first tensor are not there: nothing of it is passed on before it has its digest.
    line.hold_after(150_000)
    first = next(chunks)
    assert (first.tensor_index, first.offset) == (0, 0)
    assert relay.versions() == []
    line.release()
    rest = b"".join(chunk.data for chunk in chunks)
    assert first.data + rest == b"".join(weights(0, 100_000))


def test_differences_are_handed_on_while_they_arrive_down_a_tree(origin, line, start_relay):
    publish(origin, 0, weights(0))
    upper = start_relay("west")
    lower = start_relay("far-west", upstream=upper.address)
    for version in range(3):
        if version > 0:
            publish(origin, version, weights(version))
        assert_holds(lower, version)
    num_bytes = sum(map(len, weights(0)))
    assert upper.list_versions().bytes_sent < 1.2 * num_bytes


def test_a_broken_line_costs_nothing_that_had_come(origin, line, start_relay):
    relay = start_relay()
    line.hold_after(500_000)
    publish(origin, 0, weights(0, 200_000))
    line.wait_held()
    wait_until(lambda: _newest(relay) == 0)
    line.break_now()
    line.mend()
    assert_holds(relay, 0, 200_000)
    assert line.num_bytes < 1.5 * sum(map(len, weights(0, 200_000)))


def test_a_relay_without_its_upstream_hands_out_what_it_has(origin, line, start_relay):
    digest = publish(origin, 0, weights(0))
    relay = start_relay()
    assert_holds(relay, 0)
    line.break_now()
    relay.stop()
    relay.start()
    wait_until(lambda: relay.versions() == [0])
    assert relay.fetch_all(0, digest) == weights(0)
    with pytest.raises(grpc.RpcError) as refused:
        relay.negotiate(min_weight_version=1)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    publish(origin, 1, weights(1))
    line.mend()
    assert_holds(relay, 1)


@pytest.mark.parametrize("position", [-100, -3000])
def test_a_base_that_is_damaged_on_disk_is_told_and_healed(origin, start_relay, position):
    """Whether the damage is in a tensor that is the same in both versions, or in one that differs."""
    publish(origin, 0, weights(0))
    relay = start_relay()
    assert_holds(relay, 0)
    flip_a_bit(relay, 0, position)
    publish(origin, 1, weights(1))
    assert_holds(relay, 1)
    wait_until(lambda: relay.versions() == [1])


def test_a_version_that_is_damaged_on_the_relays_disk_comes_again(origin, start_relay):
    digest = publish(origin, 0, weights(0))
    relay = start_relay()
    assert_holds(relay, 0)
    flip_a_bit(relay, 0)
    with contextlib.suppress(grpc.RpcError):
        list(relay.fetch(0, digest, verify_first=True))
    assert_holds(relay, 0)


def test_a_bit_that_is_flipped_on_the_line_is_told_and_healed(origin, line, start_relay):
    publish(origin, 0, weights(0, 50_000))
    line.flips = 1
    relay = start_relay()
    assert_holds(relay, 0, 50_000)
    assert line.flips == 0


def test_a_version_comes_in_stripes_over_several_connections(origin, line, start_relay, monkeypatch):
    """Whole, as a difference, and once each: what a line that breaks has cost is less than what was under way."""
    monkeypatch.setattr("weights_svc.transfer.STRIPE_BYTES", 65_536)
    relay = start_relay()
    line.hold_after(600_000)
    publish(origin, 0, weights(0, 200_000))
    line.wait_held()
    line.break_now()
    line.mend()
    assert_holds(relay, 0, 200_000)
    num_bytes = sum(map(len, weights(0, 200_000)))
    assert num_bytes <= origin.list_versions().bytes_sent < num_bytes + 9 * 65_536
    before = origin.list_versions()
    publish(origin, 1, weights(1, 200_000))
    assert_holds(relay, 1, 200_000)
    after = origin.list_versions()
    assert after.bytes_full - before.bytes_full == num_bytes
    assert after.bytes_sent - before.bytes_sent < 0.2 * num_bytes


def test_a_relay_takes_whole_streams_from_an_upstream_that_cannot_end_them(origin, start_relay, monkeypatch):
    monkeypatch.setattr("weights_svc.transfer.STRIPE_BYTES", 65_536)
    monkeypatch.setattr("weights_svc.control_servicer.SERVES_RANGES", False)
    publish(origin, 0, weights(0, 200_000))
    assert_holds(start_relay(), 0, 200_000)
    assert origin.list_versions().bytes_sent == sum(map(len, weights(0, 200_000)))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_hundred_versions_come_out_as_they_were_published_whatever_breaks(origin, line, start_relay, monkeypatch):
    """Lines that break and flip bits, relays that restart or join late, bits flipped on their disks."""
    monkeypatch.setattr("weights_svc.transfer.STRIPE_BYTES", 1024)
    chance = random.Random(7)
    relays = [start_relay("west"), start_relay("east")]
    relays.append(start_relay("far-west", upstream=relays[0].address))
    for version in range(200):
        publish(origin, version, weights(version))
        for relay in relays:
            match chance.randrange(12):
                case 0:
                    line.break_now()
                    line.mend()
                case 1:
                    line.flips = 1
                case 2:
                    relay.stop()
                    relay.start()
                case 3 if held := relay.versions():
                    with contextlib.suppress(FileNotFoundError, ValueError):
                        flip_a_bit(relay, chance.choice(held), -chance.randrange(1, 6000))
                case 4 if version % 50 == 7:
                    relays.append(start_relay(f"late-{version}", upstream=chance.choice(relays).address))
        if chance.random() < 0.5:
            receiver = chance.choice(relays)
            wait_until(lambda newest=version, receiver=receiver: _newest(receiver) == newest)
            assert fetched_patiently(receiver, version) == weights(version)
    for relay in relays:
        wait_until(lambda relay=relay: _newest(relay) == 199)
        assert fetched_patiently(relay, 199) == weights(199)


def fetched_patiently(service: RunningService, version: int) -> list[bytes]:
    """As an instance does: every tensor against its digest, and again when one disagrees."""
    suspicious = False
    for _ in range(20):
        with contextlib.suppress(grpc.RpcError):
            manifest = service.negotiate(exact_weight_version=version).manifest
            data = [bytearray() for _ in manifest.tensors]
            for chunk in service.fetch(version, manifest.digest, verify_first=suspicious):
                data[chunk.tensor_index] += chunk.data
            if [bytes_digest(bytes(tensor)) for tensor in data] == [t.digest for t in manifest.tensors]:
                return [bytes(tensor) for tensor in data]
            suspicious = True
        time.sleep(0.1)
    raise AssertionError(f"version {version} cannot be had")


def test_a_version_that_the_relay_does_not_hold_is_brought_when_it_is_asked_for(origin, start_relay):
    for version in range(3):
        publish(origin, version, weights(version))
    relay = start_relay()
    assert_holds(relay, 2)
    manifest = relay.negotiate(exact_weight_version=1).manifest
    assert relay.fetch_all(1, manifest.digest) == weights(1)
    with pytest.raises(grpc.RpcError, match="weight version 7 is not here"):
        relay.negotiate(exact_weight_version=7)


def test_a_version_for_which_the_disk_had_no_room_comes_when_it_has(origin, start_relay, monkeypatch, caplog):
    monkeypatch.setattr(relay_loop, "_REFUSED_PAUSE_S", 0.05)
    publish(origin, 0, weights(0))
    relay = start_relay()
    assert_holds(relay, 0)
    measure = shutil.disk_usage
    full = {relay.folder}
    monkeypatch.setattr(
        shutil, "disk_usage", lambda folder: measure(folder)._replace(free=0) if folder in full else measure(folder)
    )
    publish(origin, 1, weights(1))
    wait_until(lambda: "version=1 cannot be had" in caplog.text)
    with pytest.raises(grpc.RpcError, match="make room") as refused:
        relay.negotiate(exact_weight_version=1)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    full.clear()
    assert_holds(relay, 1)


def test_what_the_origin_forgets_is_forgotten_and_a_new_attempt_is_followed(origin, start_relay):
    for version in range(3):
        publish(origin, version, weights(version))
    relay = start_relay(keep_versions=5)
    assert_holds(relay, 2)
    announcements = relay.watch()
    assert next(announcements) == (2, 1)
    origin.rewind(1, attempt=2)
    publish(origin, 1, weights(1), attempt=2)
    publish(origin, 2, weights(6), attempt=2)
    seen = [next(announcements)]
    while seen[-1] != (2, 2):
        seen.append(next(announcements))
    manifest = relay.negotiate(attempt=2, min_weight_version=2).manifest
    assert manifest.attempt == 2
    assert relay.fetch_all(2, manifest.digest) == weights(6)


def test_a_version_that_is_forgotten_while_it_is_committed_does_not_stay(origin, start_relay, monkeypatch):
    commit, adopt = VersionStore.commit, VersionStore.adopt
    committing, has_gone_on, committed = threading.Event(), threading.Event(), threading.Event()

    def commit_late(store, incoming, manifest, *, from_upstream=False):
        if from_upstream and manifest.weight_version == 1:
            committing.set()
            has_gone_on.wait(0.5)
            commit(store, incoming, manifest, from_upstream=True)
            committed.set()
            return None
        return commit(store, incoming, manifest, from_upstream=from_upstream)

    def adopt_and_tell(store, stored, manifest):
        adopted = adopt(store, stored, manifest)
        if manifest.attempt == 2:
            has_gone_on.set()
        return adopted

    monkeypatch.setattr(VersionStore, "commit", commit_late)
    monkeypatch.setattr(VersionStore, "adopt", adopt_and_tell)
    publish(origin, 0, weights(0))
    relay = start_relay()
    assert_holds(relay, 0)
    publish(origin, 1, weights(1))
    assert committing.wait(20)
    origin.rewind(0, attempt=2)
    publish(origin, 0, weights(0), attempt=2)
    wait_until(lambda: relay.list_versions().versions[0].attempt == 2)
    assert committed.wait(20)
    assert relay.versions() == [0]


def test_a_line_that_was_down_while_a_new_attempt_began_leaves_nothing_of_the_old_one(origin, line, start_relay):
    for version in range(4):
        publish(origin, version, weights(version))
    relay = start_relay(keep_versions=5)
    assert_holds(relay, 3)
    line.break_now()
    origin.rewind(1, attempt=2)
    for version, content in ((1, 1), (2, 8), (3, 9), (4, 10)):
        publish(origin, version, weights(content), attempt=2)
    line.mend()
    wait_until(lambda: 4 in relay.versions())
    for version, content in ((4, 10), (3, 9)):
        manifest = relay.negotiate(attempt=2, exact_weight_version=version).manifest
        assert relay.fetch_all(version, manifest.digest) == weights(content)


def test_the_origin_learns_what_receivers_have_loaded_and_frees_what_nobody_needs(origin, start_relay):
    relay = start_relay()
    for version in range(6):
        digest = publish(origin, version, weights(version))
        assert_holds(relay, version)
        relay.acknowledge(version, digest)
    wait_until(lambda: _acknowledged(origin) == {"generator-0": 5, "weights_svc@west": 5})
    origin.wait_for_versions([3, 4, 5])


def test_what_a_relay_holds_stays_at_its_origin_until_it_holds_more(origin, line, start_relay):
    publish(origin, 0, weights(0))
    relay = start_relay()
    assert_holds(relay, 0)
    wait_until(lambda: _acknowledged(origin) == {"weights_svc@west": 0})
    line.break_now()
    for version in range(1, 6):
        publish(origin, version, weights(version))
    origin.wait_for_versions([0, 3, 4, 5])
    before = origin.list_versions().bytes_sent
    line.mend()
    assert_holds(relay, 5)
    assert origin.list_versions().bytes_sent - before < 0.2 * sum(map(len, weights(0)))


def test_a_receiver_that_asks_the_origin_is_sent_to_its_sites_relay(origin, start_relay):
    relay = start_relay()
    publish(origin, 0, weights(0))
    assert_holds(relay, 0)
    assert origin.negotiate(site="west").source_address == relay.address
    assert origin.negotiate(site="west", unreachable_addresses=[relay.address]).source_address == ""
    assert origin.negotiate(site="east").source_address == ""
    relay.stop()
    wait_until(lambda: origin.negotiate(site="west").source_address == "")


def test_a_receiver_of_the_relay_may_take_differences(origin, start_relay):
    for version in range(2):
        publish(origin, version, weights(version))
    relay = start_relay()
    assert_holds(relay, 1)
    old = relay.negotiate(exact_weight_version=0).manifest
    wait_until(lambda: relay.versions() == [0, 1])
    wishes = {"held_weight_version": 0, "held_digest": old.digest}
    plan = relay.negotiate(formats=[TRANSFER_FORMAT_DELTA, TRANSFER_FORMAT_FULL], **wishes)
    assert (plan.format, plan.base_weight_version) == (TRANSFER_FORMAT_DELTA, 0)


def test_a_difference_to_what_is_not_here_is_to_be_negotiated_again(origin):
    digest = publish(origin, 1, weights(1))
    with pytest.raises(grpc.RpcError, match="negotiate again") as error:
        list(origin.fetch(1, digest, format=TRANSFER_FORMAT_DELTA, base_weight_version=0, base_digest="x"))
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE


def test_nothing_is_published_to_a_relay(origin, start_relay):
    relay = start_relay()
    for call in (lambda: publish(relay, 0), lambda: relay.rewind(0, attempt=2)):
        with pytest.raises(grpc.RpcError, match="this weights_svc is a relay") as refused:
            call()
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


def _newest(service: RunningService) -> int:
    try:
        return service.negotiate().manifest.weight_version
    except grpc.RpcError:
        return -1


def _acknowledged(service: RunningService) -> dict[str, int]:
    receivers = service.list_versions().receivers
    return {entry.receiver: entry.acknowledged.weight_version for entry in receivers}
