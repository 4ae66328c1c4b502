"""Versions on disk are whole and undamaged, or not there."""

import os
from pathlib import Path

import pytest
from safetensors import safe_open

from streamrl.digest import bytes_digest
from streamrl.errors import RefusedError, StaleAttemptError, UnavailableError, WeightTransferError
from streamrl.rpc.chunks import Stretch, cut
from streamrl.v1.weights_pb2 import ModelFile, PublishFooter, PublishHeader
from tests.weights_svc.running_service import make_data, tensor_infos
from weights_svc.ledger import Ledger
from weights_svc.store import StoredVersion, VersionReader, VersionStore

FILES = [ModelFile(name="config.json", content=b"{}"), ModelFile(name="tokenizer.json", content=b"[1]")]


def open_store(folder: Path, attempt: int = 1) -> VersionStore:
    return VersionStore(folder, Ledger(folder / "ledger.json", attempt))


def commit(
    store: VersionStore, weight_version: int, data: list[bytes] | None = None, *, attempt: int = 1, files=()
) -> StoredVersion | None:
    data = make_data(weight_version) if data is None else data
    header = PublishHeader(weight_version=weight_version, attempt=attempt, tensors=tensor_infos(data), files=files)
    incoming = store.receive(header)
    try:
        incoming.open()
        incoming.write(
            (stretch, memoryview(data[stretch.tensor_index])[stretch.offset :][: stretch.num_bytes])
            for stretch in cut([len(tensor) for tensor in data], 999)
        )
        manifest = incoming.finish(PublishFooter(digests=[bytes_digest(tensor) for tensor in data]))
        return store.commit(incoming, manifest)
    finally:
        incoming.close()


def files_in(folder: Path) -> list[str]:
    return sorted(path.name.partition("-")[0] + path.suffix for path in folder.glob("version-*"))


def restart(folder: Path) -> tuple[VersionStore, list[int]]:
    """A store on the folder after a restart, and the versions that it found undamaged."""
    store = open_store(folder)
    for stored in store.scan():
        try:
            store.verify(stored)
        except WeightTransferError:
            continue
        store.add(stored)
    return store, sorted(store.versions)


def flip_bit(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_a_committed_version_loads_with_the_safetensors_library(tmp_path):
    with open_store(tmp_path) as store:
        stored = commit(store, 3)
        with safe_open(stored.path, framework="numpy") as file:
            assert file.get_tensor("embed").tobytes() == make_data(3)[0]
            assert file.get_slice("head").get_dtype() == "BF16"
            assert set(file.keys()) == {"embed", "empty", "head"}


def test_any_stretch_can_be_read_back(tmp_path):
    with open_store(tmp_path) as store:
        stored = commit(store, 3)
        with VersionReader(stored) as reader:
            assert reader.read(Stretch(2, 10, 50)) == make_data(3)[2][10:60]


def test_a_restart_finds_what_was_committed(tmp_path):
    with open_store(tmp_path) as store:
        commit(store, 3)
        commit(store, 4)
    store, found = restart(tmp_path)
    assert found == [3, 4] and store.newest.weight_version == 4
    store.close()


def test_a_restart_looks_at_the_newest_version_first(tmp_path):
    with open_store(tmp_path) as store:
        for version in (9, 10, 8):
            commit(store, version)
    with open_store(tmp_path) as store:
        assert [stored.weight_version for stored in store.scan()] == [10, 9, 8]


def test_a_restart_removes_what_was_never_committed(tmp_path):
    with open_store(tmp_path) as store:
        commit(store, 3)
        store.receive(PublishHeader(weight_version=4, tensors=tensor_infos(make_data(4)))).open()
        (tmp_path / "version-00000005-0123456789abcdef.safetensors").write_bytes(b"renamed, but its manifest was not")
        (tmp_path / "version-00000005.partial").write_bytes(b"half a manifest")
    store, found = restart(tmp_path)
    assert found == [3]
    assert files_in(tmp_path) == ["version.manifest", "version.safetensors"]
    store.close()


@pytest.mark.parametrize("position", [0, 20, -1, -700])
def test_a_flipped_bit_in_the_data_or_the_manifest_drops_the_version(tmp_path, position):
    with open_store(tmp_path) as store:
        commit(store, 3)
        damaged = commit(store, 4)
    flip_bit(damaged.path if position < 0 else tmp_path / "version-00000004.manifest", position)
    store, found = restart(tmp_path)
    assert found == [3]
    store.close()


def test_data_that_is_cut_short_or_gone_drops_the_version(tmp_path):
    with open_store(tmp_path) as store:
        short, gone = commit(store, 3), commit(store, 4)
    os.truncate(short.path, 100)
    gone.path.unlink()
    store, found = restart(tmp_path)
    assert found == [] and files_in(tmp_path) == []
    store.close()


def test_a_file_that_is_cut_short_or_gone_while_it_is_read_is_damage(tmp_path):
    with open_store(tmp_path) as store:
        stored = commit(store, 3)
        with VersionReader(stored) as reader:
            os.truncate(stored.path, 100)
            with pytest.raises(WeightTransferError, match="cut short"):
                reader.read(Stretch(0, 0, 4000))
        stored.path.unlink()
        with pytest.raises(WeightTransferError, match="is gone"):
            VersionReader(stored)


def test_the_same_data_again_changes_nothing(tmp_path):
    with open_store(tmp_path) as store:
        first = commit(store, 3)
        assert commit(store, 3) is None
        assert store.versions[3] is first


def test_other_data_is_refused_within_an_attempt(tmp_path):
    with open_store(tmp_path) as store:
        commit(store, 3)
        with pytest.raises(FileExistsError, match="a version never changes within an attempt"):
            commit(store, 3, make_data(4))
        store.verify(store.versions[3])
        assert files_in(tmp_path) == ["version.manifest", "version.safetensors"]


def test_a_higher_attempt_may_replace_a_version(tmp_path):
    with open_store(tmp_path) as store:
        commit(store, 3)
        replaced = commit(store, 3, make_data(4), attempt=2)
        assert store.versions[3] is replaced and replaced.manifest.attempt == 2
        store.verify(replaced)
    assert files_in(tmp_path) == ["version.manifest", "version.safetensors"]
    store, found = restart(tmp_path)
    assert found == [3] and store.versions[3].manifest.digest == replaced.manifest.digest
    store.close()


def test_a_higher_attempt_takes_over_a_version_with_the_same_data(tmp_path):
    with open_store(tmp_path) as store:
        commit(store, 3)
        assert commit(store, 3, attempt=2).manifest.attempt == 2
        store.verify(store.versions[3])


def test_an_attempt_that_ended_while_its_version_came_commits_nothing(tmp_path):
    ledger = Ledger(tmp_path / "ledger.json", 1)
    with VersionStore(tmp_path, ledger) as store:
        ledger.raise_attempt(2)
        with pytest.raises(StaleAttemptError):
            commit(store, 3, attempt=1)
    assert files_in(tmp_path) == []


def test_a_withdrawn_version_can_be_read_on_and_its_files_go(tmp_path):
    with open_store(tmp_path) as store:
        stored = commit(store, 3)
        with VersionReader(stored) as reader:
            store.withdraw(stored)
            store.delete([stored])
            assert files_in(tmp_path) == [] and 3 not in store.versions
            assert reader.read(Stretch(0, 0, 4)) == make_data(3)[0][:4]
        store.flush(stored)


def test_withdrawing_a_version_spares_the_one_that_took_its_place(tmp_path):
    with open_store(tmp_path) as store:
        old = commit(store, 3)
        new = commit(store, 3, make_data(4), attempt=2)
        store.withdraw(old)
        assert store.versions[3] is new


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_version_published_again_before_its_files_went_keeps_them(tmp_path, attempt):
    with open_store(tmp_path) as store:
        old = commit(store, 3)
        store.withdraw(old)
        new = commit(store, 3, make_data(3) if attempt == 1 else make_data(4), attempt=attempt)
        store.delete([old])
        store.verify(new)
        store.flush(new)
    assert files_in(tmp_path) == ["version.manifest", "version.safetensors"]


def test_rewinding_forgets_the_versions_above_for_good(tmp_path):
    with open_store(tmp_path) as store:
        for version in (2, 3, 4, 5):
            commit(store, version)
        assert store.rewind(3) == [4, 5]
        assert store.rewind(3) == []
        assert sorted(store.versions) == [2, 3]
    store, found = restart(tmp_path)
    assert found == [2, 3]
    store.close()


def test_the_models_files_outlive_version_0_and_a_restart(tmp_path):
    with open_store(tmp_path) as store:
        with pytest.raises(UnavailableError, match="first version"):
            store.model_files()
        stored = commit(store, 0, files=FILES)
        commit(store, 1)
        assert store.model_files() == FILES
        store.flush(stored)
        store.withdraw(stored)
        store.delete([stored])
    store, _ = restart(tmp_path)
    assert store.model_files() == FILES
    store.close()


def test_damaged_model_files_are_not_handed_out(tmp_path):
    with open_store(tmp_path) as store:
        commit(store, 0, files=FILES)
        flip_bit(tmp_path / "model_files", -1)
        with pytest.raises(WeightTransferError, match="damaged on disk"):
            store.model_files()


def test_one_process_at_a_time_keeps_a_folder(tmp_path):
    with open_store(tmp_path), pytest.raises(RefusedError, match="another weights_svc keeps"):
        open_store(tmp_path)
    open_store(tmp_path).close()


def test_closing_ends_a_verification(tmp_path):
    store = open_store(tmp_path)
    stored = commit(store, 3)
    store.close()
    with pytest.raises(UnavailableError, match="ending"):
        store.verify(stored)
