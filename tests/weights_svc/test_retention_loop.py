"""Versions go when nobody needs them, and damaged ones at once."""

import grpc
import pytest

from streamrl.v1.weights_pb2 import Adapter
from tests.weights_svc.running_service import RunningService, make_data


def refusal(call) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code()


def flip_last_bit(service: RunningService, weight_version: int) -> None:
    [path] = service.folder.glob(f"version-{weight_version:08d}-*.safetensors")
    with path.open("r+b") as file:
        file.seek(-1, 2)
        [last] = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))


def test_the_newest_versions_stay_and_older_ones_go(service):
    digests = [service.publish(version) for version in range(5)]
    service.wait_for_versions([2, 3, 4])
    assert refusal(lambda: list(service.fetch(1, digests[1]))) is grpc.StatusCode.NOT_FOUND
    assert refusal(lambda: service.negotiate(exact_weight_version=1)) is grpc.StatusCode.NOT_FOUND
    service.wait_for_files(3)


def test_a_negotiated_version_stays_until_it_is_acknowledged(service):
    digest = service.publish(1)
    service.negotiate("generator-0", exact_weight_version=1)
    service.negotiate("generator-1", exact_weight_version=1)
    for version in range(2, 7):
        service.publish(version)
    service.wait_for_versions([1, 4, 5, 6])
    assert service.fetch_all(1, digest) == make_data(1)
    service.acknowledge(1, digest, "generator-0")
    service.wait_for_versions([1, 4, 5, 6])
    service.acknowledge(1, digest, "generator-1")
    service.wait_for_versions([4, 5, 6])


def test_a_version_stays_while_it_is_fetched(service):
    data = make_data(1, num_items=4_000_000)
    digest = service.publish(1, data, chunk_bytes=2**20)
    chunks = service.fetch(1, digest)
    received = [next(chunks)]
    for version in range(2, 7):
        service.publish(version)
    service.wait_for_versions([1, 4, 5, 6])
    received += chunks
    assert b"".join(chunk.data for chunk in received) == b"".join(data)


def test_a_restart_goes_on_with_what_was_announced(service):
    digests = {version: service.publish(version) for version in (1, 2, 3)}
    service.stop()
    service.start()
    service.wait_for_versions([1, 2, 3])
    assert next(service.watch()) == (3, 1)
    for version, digest in digests.items():
        assert service.fetch_all(version, digest) == make_data(version)


def test_a_version_that_was_damaged_on_disk_is_not_there_after_a_restart(service):
    service.publish(1)
    service.publish(2)
    service.stop()
    flip_last_bit(service, 2)
    service.start()
    service.wait_for_versions([1])
    assert service.negotiate().manifest.weight_version == 1
    assert service.publish(2) == service.negotiate().manifest.digest


def test_a_version_that_a_receiver_did_not_like_is_verified_and_dropped_when_damaged(service):
    digest = service.publish(1)
    assert service.fetch_all(1, digest) == make_data(1)
    assert service.fetch_all(1, digest) == make_data(1)  # verified: undamaged
    flip_last_bit(service, 1)
    assert refusal(lambda: service.fetch_all(1, digest)) is grpc.StatusCode.DATA_LOSS
    service.wait_for_versions([])
    assert service.publish(1) == digest
    assert service.fetch_all(1, digest) == make_data(1)


def test_a_version_that_is_cut_short_while_it_is_kept_is_dropped(service):
    digest = service.publish(1)
    [path] = service.folder.glob("*.safetensors")
    with path.open("r+b") as file:
        file.truncate(1000)
    assert refusal(lambda: service.fetch_all(1, digest)) is grpc.StatusCode.DATA_LOSS
    service.wait_for_versions([])


def test_a_base_stays_as_long_as_the_run_and_adapters_come_only_with_it(service):
    base = service.publish(0, is_base=True)
    adapter = Adapter(base_weight_version=0, base_digest=base, scaling=2.0)
    for version in range(1, 6):
        service.publish(version, adapter=adapter)
    service.wait_for_versions([0, 3, 4, 5])
    plan = service.negotiate()
    assert plan.manifest.adapter == adapter and plan.manifest.digest != service.publish(6)
    assert service.fetch_all(0, base) == make_data(0)
    # Whoever fetches adapters has what they are added to.
    before = service.list_versions()
    assert service.fetch_all(5, plan.manifest.digest) == make_data(5)
    after = service.list_versions()
    assert (after.bytes_full - before.bytes_full, after.bytes_sent - before.bytes_sent) == (2 * 5000, 5000)
    service.stop()
    service.start()
    service.wait_for_versions([0, 4, 5, 6])
    for wrong in (Adapter(base_weight_version=0, base_digest="x"), Adapter(base_weight_version=9, base_digest=base)):
        assert refusal(lambda wrong=wrong: service.publish(7, adapter=wrong)) is grpc.StatusCode.FAILED_PRECONDITION
