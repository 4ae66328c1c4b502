"""Versions on disk, each whole or not there at all.

    version-00000003-<digest>.safetensors    the data, readable with the safetensors library
    version-00000003.manifest                VersionManifest: its atomic rename is the commit
    model_files                              config and tokenizer (PublishHeader with its files only), kept for ever

The last two are protobuf messages behind their own digest.

A killed service loses nothing that was announced: it lies in the page cache. The flush to disk comes after the
announcement, so that a loss of power may cost the newest versions; the trainer publishes again what is missing. After a
restart a version counts only when its data agrees with its digests.

All methods block. `commit`, `rewind` and `delete` may be called from any thread; the view that `versions` gives never
changes.
"""

import fcntl
import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from streamrl.digest import bytes_digest, new_digest
from streamrl.errors import RefusedError, UnavailableError, WeightTransferError
from streamrl.rpc.chunks import Stretch, cut
from streamrl.v1.weights_pb2 import ModelFile, PublishHeader, VersionManifest
from weights_svc.incoming import PARTIAL_SUFFIX, IncomingVersion
from weights_svc.layout import lay_out
from weights_svc.ledger import Ledger

logger = logging.getLogger(__name__)

_DATA_SUFFIX = ".safetensors"
_MANIFEST_SUFFIX = ".manifest"
_DIGEST_CHARACTERS = 64
_VERIFY_CHUNK_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class StoredVersion:
    """A committed version."""

    manifest: VersionManifest
    path: Path
    """The safetensors file."""
    positions: tuple[int, ...]
    """Byte position in the file of each tensor, in the manifest's order."""

    @property
    def weight_version(self) -> int:
        return self.manifest.weight_version


class VersionStore:
    """The versions of one run. One process at a time keeps a folder."""

    def __init__(self, folder: Path, ledger: Ledger) -> None:
        self._folder = folder
        self._ledger = ledger
        self._disk_lock = threading.Lock()
        self._view_lock = threading.Lock()
        self._closing = threading.Event()
        self._versions: dict[int, StoredVersion] = {}
        self._folder_lock = (folder / "lock").open("w")
        try:
            fcntl.flock(self._folder_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._folder_lock.close()
            raise RefusedError(f"another weights_svc keeps {folder}: end it first") from error

    def __enter__(self) -> "VersionStore":
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Makes a running `verify` raise, and lets another process keep the folder."""
        self._closing.set()
        self._folder_lock.close()

    @property
    def versions(self) -> Mapping[int, StoredVersion]:
        """The versions that can be handed out, by weight version, as of now."""
        return self._versions

    @property
    def newest(self) -> StoredVersion | None:
        versions = self._versions
        return versions[max(versions)] if versions else None

    def scan(self) -> list[StoredVersion]:
        """What lies in the folder since an earlier life, newest first; removes what was never committed.

        The versions still have to be verified and then added.
        """
        found: list[StoredVersion] = []
        for path in self._folder.glob(f"*{_MANIFEST_SUFFIX}"):
            stored = self._read_manifest(path)
            if stored is None:
                path.unlink()
            else:
                found.append(stored)
        committed = {stored.path for stored in found}
        for path in self._folder.iterdir():
            if path.suffix == PARTIAL_SUFFIX or (path.suffix == _DATA_SUFFIX and path not in committed):
                logger.info("%s was never committed: removed", path.name)
                path.unlink()
        return sorted(found, key=lambda stored: -stored.weight_version)

    def add(self, stored: StoredVersion) -> None:
        """Lets a version that was found and verified be handed out."""
        with self._view_lock:
            self._versions = {**self._versions, stored.weight_version: stored}

    def verify(self, stored: StoredVersion) -> None:
        """Reads the whole version.

        Raises:
            WeightTransferError: its data does not agree with its digests.
            UnavailableError: the store was closed meanwhile.
        """
        tensors = stored.manifest.tensors
        with VersionReader(stored) as reader:
            for index, tensor in enumerate(tensors):
                digest = new_digest()
                for stretch in cut([tensor.num_bytes], _VERIFY_CHUNK_BYTES):
                    if self._closing.is_set():
                        raise UnavailableError("weights_svc is ending")
                    digest.update(reader.read(stretch._replace(tensor_index=index)))
                if digest.hexdigest() != tensor.digest:
                    raise WeightTransferError(
                        f"{tensor.name} of version {stored.weight_version} is damaged on disk ({stored.path}): "
                        f"its digest is {digest.hexdigest()} instead of {tensor.digest}"
                    )

    def receive(self, header: PublishHeader, expected_digests: Sequence[str] | None = None) -> IncomingVersion:
        """A version that is about to come.

        Args:
            expected_digests: of its tensors, where they are known before.

        Raises:
            ValueError: the header names no legal version.
        """
        return IncomingVersion(header, self._folder, expected_digests)

    def arriving(self, incoming: IncomingVersion, manifest: VersionManifest) -> StoredVersion:
        """An opened version as it can be read while it comes: its file is still the partial one."""
        assert incoming.path is not None
        return StoredVersion(manifest, incoming.path, lay_out(manifest.tensors).positions)

    def commit(
        self, incoming: IncomingVersion, manifest: VersionManifest, *, from_upstream: bool = False
    ) -> StoredVersion | None:
        """Makes a version that has come whole one of the versions.

        Args:
            from_upstream: it is one that a relay's upstream handed out, perhaps of an earlier attempt.

        Returns:
            It, or None when it was there already.

        Raises:
            FileExistsError: this attempt has published the version with another digest.
            RefusedError: it has adapters, and what they are added to is not here.
            StaleAttemptError: a higher attempt has been seen meanwhile.
        """
        version = manifest.weight_version
        with self._disk_lock:
            if not from_upstream:
                self._ledger.check(manifest.attempt)
                self._check_base(manifest)
            old = self._versions.get(version)
            if old is not None and old.manifest.attempt >= manifest.attempt:
                if old.manifest.digest == manifest.digest:
                    return None
                raise FileExistsError(
                    f"version {version} is published with digest {old.manifest.digest}, and this one has "
                    f"{manifest.digest}: a version never changes within an attempt"
                )
            assert incoming.path is not None
            stored = self._stored(manifest)
            if incoming.header.files:
                self.keep_model_files(incoming.header.files)
            incoming.path.replace(stored.path)
            incoming.path = None
            _replace_sealed(self._manifest_path(version), manifest.SerializeToString())
            self.add(stored)
            if old is not None and old.path != stored.path:
                old.path.unlink(missing_ok=True)
        return stored

    def _check_base(self, manifest: VersionManifest) -> None:
        if not manifest.HasField("adapter"):
            return
        adapter = manifest.adapter
        base = self._versions.get(adapter.base_weight_version)
        if base is None or base.manifest.digest != adapter.base_digest:
            raise RefusedError(
                f"version {manifest.weight_version} has adapters for version {adapter.base_weight_version} with digest "
                f"{adapter.base_digest}, which is not here: publish that first"
            )

    def adopt(self, stored: StoredVersion, manifest: VersionManifest) -> StoredVersion:
        """A version that is here already, as a higher attempt has published it with the same data.

        Returns:
            What is handed out from now on.
        """
        with self._disk_lock:
            if manifest.attempt <= stored.manifest.attempt:
                return stored
            adopted = StoredVersion(manifest, stored.path, stored.positions)
            _replace_sealed(self._manifest_path(manifest.weight_version), manifest.SerializeToString())
            self.add(adopted)
        return adopted

    def forget(self, stored: StoredVersion) -> None:
        """Withdraws a version and deletes it."""
        self.withdraw(stored)
        self.delete([stored])

    def keep_model_files(self, files: Iterable[ModelFile]) -> None:
        """Config and tokenizer of the run's model, in place of those that were kept before."""
        _replace_sealed(self._model_files_path, PublishHeader(files=files).SerializeToString())

    def flush(self, stored: StoredVersion) -> None:
        """Brings a committed version to the disk itself; one that has been deleted meanwhile is passed over.

        Raises:
            OSError: the disk failed.
        """
        try:
            for path in (stored.path, self._manifest_path(stored.weight_version), self._folder):
                _flush(path)
            if self._model_files_path.exists():
                _flush(self._model_files_path)
        except FileNotFoundError:
            logger.debug("version=%d was deleted before it was flushed", stored.weight_version)

    def withdraw(self, stored: StoredVersion) -> None:
        """Takes a version out of `versions`, unless another has taken its place; its files stay until `delete`."""
        with self._view_lock:
            self._versions = {version: kept for version, kept in self._versions.items() if kept is not stored}

    def delete(self, withdrawn: Iterable[StoredVersion]) -> None:
        """Deletes the files of versions that were withdrawn; what reads them now can go on."""
        with self._disk_lock:
            for stored in withdrawn:
                published_again = self._versions.get(stored.weight_version)
                if published_again is None:
                    self._manifest_path(stored.weight_version).unlink(missing_ok=True)
                if published_again is None or published_again.path != stored.path:
                    stored.path.unlink(missing_ok=True)

    def rewind(self, weight_version: int) -> list[int]:
        """Forgets the versions above one, also if the power goes right afterwards.

        Returns:
            Those that were forgotten.
        """
        versions = self._versions
        above = [version for version in sorted(versions) if version > weight_version]
        for version in above:
            self.withdraw(versions[version])
        self.delete([versions[version] for version in above])
        _flush(self._folder)
        return above

    def model_files(self) -> list[ModelFile]:
        """Config and tokenizer of the run's model.

        Raises:
            UnavailableError: nobody has published any yet.
            WeightTransferError: they are damaged on disk.
        """
        if not self._model_files_path.exists():
            raise UnavailableError("the model's files are not published yet: they come with an attempt's first version")
        return list(PublishHeader.FromString(_read_sealed(self._model_files_path)).files)

    @property
    def _model_files_path(self) -> Path:
        return self._folder / "model_files"

    def _manifest_path(self, weight_version: int) -> Path:
        return self._folder / f"version-{weight_version:08d}{_MANIFEST_SUFFIX}"

    def _stored(self, manifest: VersionManifest) -> StoredVersion:
        name = f"version-{manifest.weight_version:08d}-{manifest.digest[:16]}{_DATA_SUFFIX}"
        return StoredVersion(manifest, self._folder / name, lay_out(manifest.tensors).positions)

    def _read_manifest(self, path: Path) -> StoredVersion | None:
        """The version of a manifest, if it is undamaged and its data has the right size."""
        try:
            manifest = VersionManifest.FromString(_read_sealed(path))
        except WeightTransferError as error:
            logger.error("its version is dropped: %s", error)
            return None
        stored, expected_bytes = self._stored(manifest), lay_out(manifest.tensors).num_bytes
        if not stored.path.exists() or stored.path.stat().st_size != expected_bytes:
            logger.error("%s has no data of %d bytes: its version is dropped", path.name, expected_bytes)
            return None
        return stored


class VersionReader:
    """Reads the data of one version from its file, which may be deleted meanwhile."""

    def __init__(self, stored: StoredVersion) -> None:
        """
        Raises:
            WeightTransferError: the file is gone.
        """
        self._stored = stored
        try:
            self._file = os.open(stored.path, os.O_RDONLY)
        except FileNotFoundError as error:
            raise WeightTransferError(f"the data of version {stored.weight_version} is gone: {stored.path}") from error

    def __enter__(self) -> "VersionReader":
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._file)

    def read(self, stretch: Stretch) -> bytes:
        """
        Raises:
            WeightTransferError: the file ends before the stretch does.
        """
        position = self._stored.positions[stretch.tensor_index] + stretch.offset
        data = os.pread(self._file, stretch.num_bytes, position)
        if len(data) != stretch.num_bytes:
            raise WeightTransferError(f"{self._stored.path} is cut short at byte {position + len(data)}")
        return data


def _replace_sealed(path: Path, content: bytes) -> None:
    """Writes a file as a whole, its own digest first."""
    partial = path.with_suffix(PARTIAL_SUFFIX)
    partial.write_bytes(bytes_digest(content).encode() + content)
    partial.replace(path)


def _read_sealed(path: Path) -> bytes:
    sealed = path.read_bytes()
    digest, content = sealed[:_DIGEST_CHARACTERS], sealed[_DIGEST_CHARACTERS:]
    if bytes_digest(content).encode() != digest:
        raise WeightTransferError(f"{path} is damaged on disk: it disagrees with its own digest")
    return content


def _flush(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
