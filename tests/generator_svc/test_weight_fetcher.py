"""Versions fetched over a real connection that breaks, lies and hangs."""

import threading
from typing import Any

import pytest
import torch

from generator_svc import weight_fetcher
from generator_svc.version_buffer import VersionBuffer, open_tensors
from generator_svc.weight_fetcher import FetchedVersion, WeightFetch, WeightSource
from streamrl.errors import WeightTransferError
from streamrl.v1.weights_pb2 import VersionManifest

TENSORS = {"a": torch.randn(10, 5), "empty": torch.empty(0), "b": torch.randn(77).to(torch.bfloat16)}


def fetch_of(published: Any, manifest: VersionManifest, *, patience_s: float = 20.0) -> WeightFetch:
    return WeightFetch(
        WeightSource(published.address, "run", attempt=1, receiver="generator-0", site="a", patience_s=patience_s),
        manifest,
    )


def assert_whole(fetched: FetchedVersion) -> None:
    arrived = dict(open_tensors(fetched.buffer.path, fetched.manifest))
    fetched.buffer.close()
    assert all(torch.equal(arrived[name], tensor) for name, tensor in TENSORS.items())


def test_every_tensor_arrives(published: Any) -> None:
    assert_whole(fetch_of(published, published.publish(4, TENSORS)).run())
    assert published.positions == [(0, 0)]


def test_a_broken_stream_goes_on_from_the_last_whole_chunk(published: Any) -> None:
    manifest = published.publish(4, TENSORS)
    published.break_after_chunks = [2, 3]
    assert_whole(fetch_of(published, manifest).run())
    # 200 bytes of "a" are four chunks of 64; the fifth chunk is the first of "b".
    assert published.positions == [(0, 0), (0, 128), (2, 64)]


def test_a_version_of_nothing_but_empty_tensors_needs_no_stream(published: Any) -> None:
    fetched = fetch_of(published, published.publish(4, {"empty": torch.empty(0)})).run()
    fetched.buffer.close()
    assert published.positions == []


def test_another_source_is_followed(published: Any) -> None:
    manifest = published.publish(4, TENSORS)
    published.source_address = "127.0.0.1:1"
    with pytest.raises(WeightTransferError, match=r"127\.0\.0\.1:1"):
        fetch_of(published, manifest, patience_s=0.0).run()


def test_a_digest_that_disagrees_is_an_error(published: Any) -> None:
    manifest = published.publish(4, TENSORS)
    published.corrupt_tensor = 2
    with pytest.raises(WeightTransferError, match="b arrived with digest"):
        fetch_of(published, manifest).run()


def test_a_tensor_that_arrives_damaged_is_verified_at_the_source_and_fetched_again(published: Any) -> None:
    manifest = published.publish(4, TENSORS)
    published.corrupt_tensor = 2
    published.heals_when_verified = True
    assert_whole(fetch_of(published, manifest).run())
    assert published.positions == [(0, 0), (2, 0)]


def test_what_cannot_be_decoded_comes_again_and_what_came_before_it_does_not(published: Any) -> None:
    manifest = published.publish(4, TENSORS)
    published.garble_after_chunks = [5]
    assert_whole(fetch_of(published, manifest).run())
    assert published.positions == [(0, 0), (2, 0)]


def test_what_cannot_be_decoded_again_and_again_is_an_error(published: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_fetcher, "_RETRY_WAIT_S", 0.01)
    manifest = published.publish(4, TENSORS)
    published.garble_after_chunks = [0] * 9
    with pytest.raises(WeightTransferError, match="a difference came for a, which has no base"):
        fetch_of(published, manifest).run()
    assert len(published.positions) == 4


def test_a_source_that_does_not_answer_is_named_when_another_is_asked_for(published: Any) -> None:
    manifest = published.publish(4, TENSORS)
    published.source_address = "127.0.0.1:1"
    assert_whole(fetch_of(published, manifest).run())


def test_a_manifest_that_disagrees_with_itself_is_an_error(published: Any) -> None:
    manifest = published.publish(4, TENSORS)
    base = VersionBuffer(manifest)
    manifest.tensors[0].digest = "0" * 64
    source = WeightSource(published.address, "run", attempt=1, receiver="generator-0", site="a", keep_base=True)
    with pytest.raises(WeightTransferError, match="own digest"):
        WeightFetch(source, manifest, base).run()
    with pytest.raises(ValueError, match="released"):
        base.tensor_bytes(0)


def test_a_service_that_holds_other_weights_under_the_number_is_refused(published: Any) -> None:
    manifest = published.publish(4, TENSORS)
    published.publish(4, {"a": torch.zeros(1)})
    with pytest.raises(WeightTransferError, match="it holds digest"):
        fetch_of(published, manifest).run()


def test_a_version_that_is_gone_is_an_error_at_once(published: Any) -> None:
    manifest = published.publish(4, TENSORS)
    published.forget(4)
    with pytest.raises(WeightTransferError, match="is not held"):
        fetch_of(published, manifest).run()


def test_patience_ends_when_nobody_answers(published: Any) -> None:
    manifest = published.publish(4, TENSORS)
    source = WeightSource("127.0.0.1:1", "run", attempt=1, receiver="generator-0", site="a", patience_s=0.0)
    with pytest.raises(WeightTransferError, match="nothing came"):
        WeightFetch(source, manifest).run()


def test_a_fetch_that_hangs_can_be_cancelled(published: Any) -> None:
    manifest = published.publish(4, TENSORS)
    published.gate.clear()
    fetch = fetch_of(published, manifest)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            fetch.run()
        except WeightTransferError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert published.waiting.wait(20.0)
    fetch.cancel()
    thread.join(20.0)
    assert len(errors) == 1
