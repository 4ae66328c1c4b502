"""WeightsService over real gRPC: generated clients against the service."""

import threading
from collections.abc import Iterator

import grpc
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.digest import bytes_digest, version_digest
from streamrl.v1.weights_pb2 import Canary, ListVersionsRequest, ModelFile, PublishFooter, PublishHeader, PublishRequest
from tests.weights_svc.running_service import (
    DEADLINE_S,
    RUN_ID,
    make_data,
    publish_requests,
    tensor_infos,
    wait_until,
)
from weights_svc.store import VersionStore

FILES = [ModelFile(name="config.json", content=b"{}")]


def refusal(call) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()


def test_a_version_comes_out_as_it_went_in(service):
    data = make_data(3)
    canary = Canary(token_ids=[1, 2], logprobs=[-0.5])
    digest = service.publish(3, data, canaries=[canary])
    plan = service.negotiate()
    assert plan.manifest.weight_version == 3 and plan.manifest.digest == digest
    assert plan.manifest.digest == version_digest(plan.manifest.tensors)
    assert [tensor.digest for tensor in plan.manifest.tensors] == [bytes_digest(tensor) for tensor in data]
    assert plan.transfer_bytes == plan.manifest.num_bytes == sum(map(len, data))
    assert list(plan.manifest.canaries) == [canary] and plan.source_address == ""
    assert service.fetch_all(3, digest) == data


def test_a_fetch_goes_on_from_any_position(service):
    data = make_data(3)
    digest = service.publish(3, data)
    joined = b"".join(data)

    @given(st.integers(0, len(joined)))
    @settings(max_examples=20, deadline=None)
    def goes_on(position: int) -> None:
        index, offset = (0, position) if position <= len(data[0]) else (2, position - len(data[0]))
        chunks = list(service.fetch(3, digest, first_tensor_index=index, first_offset=offset))
        assert b"".join(chunk.data for chunk in chunks) == joined[position:]
        if chunks:
            assert all(len(chunk.data) <= 4096 for chunk in chunks)

    goes_on()


def test_a_fetch_behind_the_last_byte_sends_nothing(service):
    digest = service.publish(3)
    assert list(service.fetch(3, digest, first_tensor_index=3)) == []


@pytest.mark.parametrize("position", [(0, 4001), (3, 1), (4, 0), (-1, 0), (0, -1)])
def test_a_fetch_from_nowhere_is_refused(service, position):
    digest = service.publish(3)
    index, offset = position
    code, details = refusal(lambda: list(service.fetch(3, digest, first_tensor_index=index, first_offset=offset)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT and "expected a position" in details


def test_a_fetch_of_another_version_digest_or_form_is_refused(service):
    digest = service.publish(3)
    assert refusal(lambda: list(service.fetch(4, digest)))[0] is grpc.StatusCode.NOT_FOUND
    assert refusal(lambda: list(service.fetch(3, "other")))[0] is grpc.StatusCode.FAILED_PRECONDITION
    assert refusal(lambda: list(service.fetch(3, digest, format=77)))[0] is grpc.StatusCode.INVALID_ARGUMENT


def test_calls_for_another_run_are_refused(service):
    code, details = refusal(lambda: service.stub.ListVersions(ListVersionsRequest(run_id="other"), timeout=DEADLINE_S))
    assert code is grpc.StatusCode.FAILED_PRECONDITION and f"run {RUN_ID}, not of 'other'" in details


def test_the_models_files_come_with_a_negotiation_that_asks_for_them(service):
    assert refusal(lambda: service.negotiate(with_files=True))[0] is grpc.StatusCode.UNAVAILABLE
    service.publish(0, files=FILES)
    assert list(service.negotiate(with_files=True).files) == FILES
    assert list(service.negotiate().files) == []


def test_negotiation_refusals_have_their_status(service):
    assert refusal(lambda: service.negotiate())[0] is grpc.StatusCode.UNAVAILABLE
    digest = service.publish(3)
    assert service.negotiate(held_weight_version=3, held_digest=digest).transfer_bytes == 0
    assert refusal(lambda: service.negotiate(exact_weight_version=0))[0] is grpc.StatusCode.NOT_FOUND
    assert refusal(lambda: service.negotiate(min_weight_version=4))[0] is grpc.StatusCode.UNAVAILABLE
    assert refusal(lambda: service.negotiate(formats=[]))[0] is grpc.StatusCode.INVALID_ARGUMENT


def damaged(requests: list[PublishRequest]) -> list[PublishRequest]:
    requests[1].chunk.data = b"x" + requests[1].chunk.data[1:]
    return requests


@pytest.mark.parametrize(
    ("damage", "code", "message"),
    [
        (lambda requests: requests[:-1], "INVALID_ARGUMENT", "without a footer"),
        (lambda requests: requests[1:], "INVALID_ARGUMENT", "does not begin with a header"),
        (lambda requests: [], "INVALID_ARGUMENT", "does not begin with a header"),
        (lambda requests: requests[:3] + requests[4:], "INVALID_ARGUMENT", "expected those of tensor 0 of 3 at 1400"),
        (lambda requests: [requests[0], requests[2], requests[1], *requests[3:]], "INVALID_ARGUMENT", "expected those"),
        (lambda requests: [*requests[:-2], requests[-1]], "INVALID_ARGUMENT", "ended at tensor 2 of 3"),
        (lambda requests: [*requests, requests[1]], "INVALID_ARGUMENT", "after its footer"),
        (lambda requests: [requests[0], *requests], "INVALID_ARGUMENT", "a second header"),
        (lambda requests: [requests[0], PublishRequest(), *requests[1:]], "INVALID_ARGUMENT", "an empty part"),
        (
            lambda requests: [*requests[:-1], PublishRequest(footer=PublishFooter(digests=["a"]))],
            "INVALID_ARGUMENT",
            "expected one each",
        ),
        (damaged, "DATA_LOSS", "embed of version 3 was sent with digest"),
    ],
)
def test_a_publish_that_is_not_whole_is_refused_and_leaves_nothing(service, damage, code, message):
    service.publish(2)
    requests = damage(publish_requests(3, make_data(3)))
    found_code, details = refusal(lambda: service.send(requests))
    assert found_code.name == code and message in details
    assert service.versions() == [2]
    service.wait_for_files(1)


def test_a_publisher_that_goes_away_leaves_nothing(service):
    begun, gone = threading.Event(), threading.Event()

    def requests() -> Iterator[PublishRequest]:
        yield from publish_requests(3, make_data(3))[:4]
        begun.set()
        gone.wait(DEADLINE_S)

    call = service.stub.Publish.future(requests(), timeout=DEADLINE_S)
    assert begun.wait(DEADLINE_S)
    wait_until(lambda: len(list(service.folder.glob("version-*.partial"))) == 1)
    call.cancel()
    gone.set()
    service.wait_for_files(0)
    assert service.versions() == []
    service.publish(3)
    service.wait_for_files(1)


def test_a_receiver_that_goes_away_leaves_no_open_file(service):
    def open_files() -> list[str]:
        return [file.path for file in psutil.Process().open_files() if file.path.endswith(".safetensors")]

    digest = service.publish(3, make_data(3, num_items=4_000_000), chunk_bytes=2**20)
    chunks = service.fetch(3, digest)
    next(chunks)
    assert open_files()
    chunks.close()
    service.channel.close()
    wait_until(lambda: open_files() == [])


def test_publishing_again_is_harmless_and_other_data_is_refused(service):
    digest = service.publish(3)
    assert service.publish(3) == digest
    code, details = refusal(lambda: service.publish(3, make_data(4)))
    assert code is grpc.StatusCode.ALREADY_EXISTS and digest in details
    assert service.fetch_all(3, digest) == make_data(3)


def test_a_higher_attempt_replaces_a_version_and_ends_the_lower_one(service):
    service.publish(3)
    digest = service.publish(3, make_data(4), attempt=2)
    assert service.fetch_all(3, digest) == make_data(4)
    for call in (
        lambda: service.publish(4),
        lambda: service.negotiate(attempt=1),
        lambda: service.acknowledge(3, digest, attempt=1),
        lambda: service.rewind(0, attempt=1),
    ):
        code, details = refusal(call)
        assert code is grpc.StatusCode.FAILED_PRECONDITION and details.startswith("stale attempt (now 2): ")


def test_a_receiver_does_not_raise_the_attempt(service):
    service.publish(3)
    service.negotiate(attempt=9)
    service.publish(4)


def test_rewinding_forgets_the_versions_above(service):
    for version in (1, 2, 3):
        service.publish(version)
    watch = service.watch()
    assert next(watch) == (3, 1)
    assert service.rewind(1, attempt=2) == [2, 3]
    assert next(watch) == (1, 1)
    assert service.versions() == [1]
    assert service.negotiate(attempt=2).manifest.weight_version == 1
    service.publish(2, make_data(7), attempt=2)
    assert service.versions() == [1, 2]


def test_a_watcher_gets_the_newest_at_once_and_then_each_later_one(service):
    service.publish(3)
    service.publish(4)
    watch = service.watch()
    assert next(watch) == (4, 1)
    service.publish(5)
    service.publish(5)  # nothing new
    service.publish(6)
    service.publish(6, attempt=2)  # taken over
    assert [next(watch) for _ in range(3)] == [(5, 1), (6, 1), (6, 2)]


def test_an_old_version_that_comes_late_is_not_announced(service):
    service.publish(5)
    watch = service.watch()
    assert next(watch) == (5, 1)
    service.publish(4)
    service.publish(6)
    assert next(watch) == (6, 1)


def test_a_watch_ends_when_the_service_does(service):
    watch = service.watch()
    service.publish(3)
    assert next(watch) == (3, 1)
    service.ask_to_stop()
    assert refusal(lambda: next(watch))[0] is grpc.StatusCode.UNAVAILABLE


def test_traffic_counts_the_data_of_fetches_and_outlives_a_restart(service):
    data = make_data(3)
    digest = service.publish(3, data)
    num_bytes = sum(map(len, data))
    service.fetch_all(3, digest)
    list(service.fetch(3, digest, first_tensor_index=2))
    listed = service.list_versions()
    assert listed.bytes_full == listed.bytes_sent == num_bytes + len(data[2])
    service.stop()
    service.start()
    assert service.list_versions().bytes_sent == listed.bytes_sent


def test_what_receivers_loaded_is_listed(service):
    digest = service.publish(3)
    service.acknowledge(3, digest, receiver="generator-1")
    [receiver] = service.list_versions().receivers
    assert receiver.receiver == "generator-1"
    assert receiver.acknowledged.weight_version == 3 and receiver.acknowledged.fetch_s == 0.5


def test_a_receiver_that_loaded_something_else_is_told(service):
    service.publish(3)
    code, details = refusal(lambda: service.acknowledge(3, "other"))
    assert code is grpc.StatusCode.FAILED_PRECONDITION and "with digest other" in details


def test_many_tiny_tensors_come_through(service):
    data = [bytes([index % 256] * 4) for index in range(3000)]
    infos = [tensor_infos([tensor, b"", b""])[0] for tensor in data]
    for index, info in enumerate(infos):
        info.name = f"expert.{index}"
    requests = publish_requests(0, [b"".join(data), b"", b""], chunk_bytes=4)
    for index, request in enumerate(requests[1:-1]):
        request.chunk.tensor_index, request.chunk.offset = index, 0
    header = PublishHeader(run_id=RUN_ID, attempt=1, weight_version=0, tensors=infos)
    digests = [bytes_digest(tensor) for tensor in data]
    digest = service.send(
        [
            PublishRequest(header=header),
            *requests[1:-1],
            PublishRequest(footer=PublishFooter(digests=digests)),
        ]
    )
    assert service.fetch_all(0, digest, num_tensors=3000) == data


def test_a_version_that_goes_while_it_is_negotiated_is_to_be_negotiated_again(service, monkeypatch):
    service.publish(0, files=FILES)
    model_files = VersionStore.model_files

    def forget_and_give(store):
        store.rewind(-1)
        return model_files(store)

    monkeypatch.setattr(VersionStore, "model_files", forget_and_give)
    code, details = refusal(lambda: service.negotiate(with_files=True))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "version 0 has gone just now: negotiate again" in details
