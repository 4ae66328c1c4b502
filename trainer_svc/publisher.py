"""Publishes weight versions: one stream each to weights_svc, in the background, while training goes on.

Who gathers the tensors of a version (the shards of all ranks) hands them over as a snapshot: named tensors on the CPU
that nobody changes any more. Their data is digested while it is sent, and never copied as a whole.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from streamrl.digest import bytes_digest, new_digest, version_digest
from streamrl.errors import PublishError, RefusedError, UnavailableError, WeightTransferError
from streamrl.rpc.channel import open_channel
from streamrl.rpc.chunks import cut, encode_publish_request
from streamrl.rpc.errors import peer_errors
from streamrl.v1.weights_pb2 import (
    Adapter,
    Canary,
    ListVersionsRequest,
    ModelFile,
    PublishFooter,
    PublishHeader,
    PublishRequest,
    PublishResponse,
    RewindRequest,
    TensorInfo,
    VersionManifest,
)
from streamrl.v1.weights_pb2_grpc import WeightsServiceStub

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_PUBLISH_METHOD = "/streamrl.v1.WeightsService/Publish"
_SLOWEST_BYTES_PER_S = 10e6
"""A stream slower than this misses its deadline and begins anew."""
_LONGEST_RECOVERY_S = 3600.0
"""A weights_svc that starts reads all that it holds before it forgets any of it; one that is gone shows at once."""
_FIRST_RETRY_WAIT_S = 0.2
_LONGEST_RETRY_WAIT_S = 5.0

_DTYPE_NAMES = {
    "torch.bool": "BOOL",
    "torch.uint8": "U8",
    "torch.int8": "I8",
    "torch.int16": "I16",
    "torch.int32": "I32",
    "torch.int64": "I64",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.float32": "F32",
    "torch.float64": "F64",
}
"""safetensors' names of dtypes."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A weight version as it is handed over."""

    weight_version: int
    tensors: Sequence[tuple[str, "torch.Tensor"]]
    """By name, on the CPU, in the order in which they are sent; not to be changed before they are published."""
    files: Sequence[ModelFile] = ()
    """Config and tokenizer: with the first version of an attempt."""
    canaries: Sequence[Canary] = ()
    adapter: Adapter | None = None
    """What the tensors are added to, where they are adapters."""
    is_base: bool = False
    """Whether later versions are adapters of this one."""


@dataclass(frozen=True, slots=True)
class Publication:
    """A version that was announced."""

    weight_version: int
    digest: str
    num_bytes: int
    started_s: float
    """Unix time."""
    publish_s: float
    """From the hand-over to the announcement, with retries."""


@dataclass(slots=True)
class _Outcomes:
    """What the background thread has to tell."""

    publications: list[Publication] = field(default_factory=list)
    error: PublishError | None = None


class Publisher:
    """The trainer's end of weights_svc. Its methods are for one thread."""

    def __init__(
        self, address: str, run_id: str, attempt: int, *, chunk_bytes: int, deadline_s: float, patience_s: float
    ) -> None:
        """
        Args:
            address: host:port of weights_svc.
            chunk_bytes: the data travels in chunks of this size.
            deadline_s: of a call without its data.
            patience_s: how long a publish that fails is tried again.
        """
        self._peer = f"weights_svc at {address}"
        self._run_id = run_id
        self._attempt = attempt
        self._chunk_bytes = chunk_bytes
        self._deadline_s = deadline_s
        self._patience_s = patience_s
        self._channel = open_channel(address)
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._outcomes = _Outcomes()
        self.base_digest = ""
        """Of the base that weights_svc holds, as far as is known here; empty: none is."""
        self.make_base: Callable[[], Snapshot] | None = None
        """Makes the base once more, for a weights_svc that has lost it; on the thread that this publisher is for."""
        self._changed = threading.Condition()
        """Of the two below."""
        self._waits_for_base = False
        """Whether what is sent in the background waits until weights_svc holds its base again."""
        self._sent = True
        """Whether nothing is sent in the background."""

    def publish(self, snapshot: Snapshot) -> Publication:
        """Publishes a version and waits until it is announced.

        Raises:
            PublishError: it was refused, or weights_svc could not be reached in time.
            ValueError: a tensor is not on the CPU, or has a dtype that safetensors does not know.
        """
        infos = [_tensor_info(name, tensor) for name, tensor in snapshot.tensors]
        num_bytes = sum(info.num_bytes for info in infos)
        started_s, started = time.time(), time.monotonic()
        digest = self._publish_patiently(snapshot, infos)
        if snapshot.is_base:
            self.base_digest = digest
        publication = Publication(snapshot.weight_version, digest, num_bytes, started_s, time.monotonic() - started)
        logger.info(
            "version=%d is published: %d bytes in %.2f s", snapshot.weight_version, num_bytes, publication.publish_s
        )
        return publication

    def submit(self, snapshot: Snapshot) -> None:
        """Publishes a version in the background. Waits first while another one is still unsent.

        Raises:
            PublishError: an earlier version could not be published.
        """
        self.wait()
        self._sent = False
        self._thread = threading.Thread(
            target=self._publish_in_background,
            args=(snapshot,),
            name=f"publish-{snapshot.weight_version}",
            daemon=True,  # a trainer that fails does not wait for it
        )
        self._thread.start()

    def wait(self) -> None:
        """Waits until everything that was submitted is announced.

        Raises:
            PublishError: a version could not be published.
        """
        while self._thread is not None:
            with self._changed:
                self._changed.wait_for(lambda: self._sent or self._waits_for_base)
            if self._sent:
                self._thread.join()
                self._thread = None
            else:
                self.check()
        self.check()

    def check(self) -> None:
        """Gives weights_svc the base once more if it has lost it, as with its disk. Call it now and then.

        Raises:
            PublishError: a version could not be published.
        """
        if self._waits_for_base and self.make_base is not None:
            self.provide_base(self.make_base())
            self._go_on()
        if self._outcomes.error is not None:
            raise self._outcomes.error

    def take_publications(self) -> list[Publication]:
        """What was submitted and announced since the last call."""
        taken = []
        while self._outcomes.publications:
            taken.append(self._outcomes.publications.pop(0))
        return taken

    def provide_base(self, snapshot: Snapshot) -> None:
        """Has weights_svc hold a base: publishes it, unless it is there. Not beside other versions on their way.

        Raises:
            PublishError: as `publish`.
        """
        infos = [_tensor_info(name, tensor) for name, tensor in snapshot.tensors]
        for info, (_name, tensor) in zip(infos, snapshot.tensors, strict=True):
            info.digest = bytes_digest(_tensor_data(tensor))
        digest = version_digest(infos)
        try:
            held = self._held(snapshot.weight_version)
        except UnavailableError:
            held = None  # `publish` is patient
        if held is not None and held.is_base and held.digest == digest:
            self.base_digest = digest
            return
        if held is not None and held.is_base:
            logger.warning(
                "the weights that adapters learn beside are not those that the run began with: model.path has other "
                "files now"
            )
        self.publish(snapshot)

    def _held(self, weight_version: int) -> VersionManifest | None:
        """The version as weights_svc holds it; None: it does not.

        Raises:
            UnavailableError: it does not answer.
        """
        with peer_errors(self._peer):
            held = WeightsServiceStub(self._channel).ListVersions(
                ListVersionsRequest(run_id=self._run_id), timeout=self._deadline_s
            )
        return next((manifest for manifest in held.versions if manifest.weight_version == weight_version), None)

    def rewind(self, weight_version: int) -> set[int]:
        """Has weights_svc forget the versions above one, which a resumed run begins with.

        Returns:
            Those that it still holds.

        Raises:
            UnavailableError: it did not answer for `patience_s`.
            RefusedError: it answered no, as to a process of an earlier attempt.
        """
        request = RewindRequest(run_id=self._run_id, attempt=self._attempt, weight_version=weight_version)
        stub, failing_since = WeightsServiceStub(self._channel), time.monotonic()
        while True:
            called = time.monotonic()
            try:
                with peer_errors(self._peer):
                    forgotten = stub.Rewind(request, timeout=_LONGEST_RECOVERY_S).forgotten_weight_versions
                    held = stub.ListVersions(ListVersionsRequest(run_id=self._run_id), timeout=self._deadline_s)
            except UnavailableError as error:
                if time.monotonic() - called > self._patience_s:
                    # It was there and worked for so long, and has begun anew.
                    failing_since = time.monotonic()
                if time.monotonic() - failing_since > self._patience_s or self._closed.wait(_FIRST_RETRY_WAIT_S):
                    raise
                logger.debug("not rewound yet: %s", error)
                continue
            logger.info("version=%d is the newest again; forgotten: %s", weight_version, list(forgotten) or "none")
            return {manifest.weight_version for manifest in held.versions}

    def close(self) -> None:
        """Gives up what is still unsent: `wait` first to keep it."""
        self._closed.set()
        self._go_on()
        self._channel.close()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _publish_in_background(self, snapshot: Snapshot) -> None:
        try:
            self._outcomes.publications.append(self.publish(snapshot))
        except PublishError as error:
            if not self._closed.is_set():
                logger.error("%s", error)
            self._outcomes.error = error
        except Exception as error:  # a thread's outermost edge: the trainer must learn why it ended
            logger.exception("version=%d", snapshot.weight_version)
            self._outcomes.error = PublishError(f"version {snapshot.weight_version} cannot be published: {error}")
        finally:
            with self._changed:
                self._sent = True
                self._changed.notify_all()

    def _publish_patiently(self, snapshot: Snapshot, infos: Sequence[TensorInfo]) -> str:
        """The digest of the version, once it is announced."""
        wait_s = _FIRST_RETRY_WAIT_S
        failing_since: float | None = None
        while True:
            try:
                return self._stream(snapshot, infos)
            except (UnavailableError, WeightTransferError) as error:
                now = time.monotonic()
                failing_since = now if failing_since is None else failing_since
                if self._closed.is_set() or now - failing_since > self._patience_s:
                    raise PublishError(f"version {snapshot.weight_version} cannot be published: {error}") from error
                logger.warning("version=%d is not published yet, trying again: %s", snapshot.weight_version, error)
            except RefusedError as error:
                if not self._base_is_lost(snapshot):
                    raise PublishError(f"version {snapshot.weight_version} cannot be published: {error}") from error
                self._have_base_again()
                continue
            if self._closed.wait(wait_s):
                raise PublishError(f"version {snapshot.weight_version} was not published: the publisher was closed")
            wait_s = min(2 * wait_s, _LONGEST_RETRY_WAIT_S)

    def _base_is_lost(self, snapshot: Snapshot) -> bool:
        """Whether weights_svc has lost what a snapshot's adapters are added to, and it can be made once more."""
        adapter = snapshot.adapter
        if adapter is None or self.make_base is None or self._closed.is_set():
            return False
        try:
            held = self._held(adapter.base_weight_version)
        except UnavailableError:
            return True  # whoever provides it asks once more
        return held is None or held.digest != adapter.base_digest

    def _have_base_again(self) -> None:
        """Returns when it is there again, or this is closed."""
        logger.warning("%s has lost what adapters are added to: it is published again", self._peer)
        if threading.current_thread() is not self._thread:
            assert self.make_base is not None
            self.provide_base(self.make_base())
            return
        with self._changed:
            self._waits_for_base = not self._closed.is_set()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._waits_for_base)

    def _go_on(self) -> None:
        with self._changed:
            self._waits_for_base = False
            self._changed.notify_all()

    def _stream(self, snapshot: Snapshot, infos: Sequence[TensorInfo]) -> str:
        # Requests come serialised: chunks are encoded with one copy.
        call = self._channel.stream_unary(_PUBLISH_METHOD, None, PublishResponse.FromString)
        num_bytes = sum(info.num_bytes for info in infos)
        with peer_errors(self._peer):
            response = call(
                self._requests(snapshot, infos), timeout=self._deadline_s + num_bytes / _SLOWEST_BYTES_PER_S
            )
        digest: str = response.digest
        return digest

    def _requests(self, snapshot: Snapshot, infos: Sequence[TensorInfo]) -> Iterator[bytes]:
        """The stream of one publish, serialised."""
        header = PublishHeader(
            run_id=self._run_id,
            attempt=self._attempt,
            weight_version=snapshot.weight_version,
            tensors=infos,
            files=snapshot.files,
            canaries=snapshot.canaries,
            adapter=snapshot.adapter,
            is_base=snapshot.is_base,
        )
        yield PublishRequest(header=header).SerializeToString()
        digests = []
        for index, (_name, tensor) in enumerate(snapshot.tensors):
            data = _tensor_data(tensor)
            digest = new_digest()
            for stretch in cut([len(data)], self._chunk_bytes):
                stretch_data = data[stretch.offset : stretch.offset + stretch.num_bytes]
                digest.update(stretch_data)
                yield encode_publish_request(stretch._replace(tensor_index=index), stretch_data)
            digests.append(digest.hexdigest())
        yield PublishRequest(footer=PublishFooter(digests=digests)).SerializeToString()


def _tensor_info(name: str, tensor: "torch.Tensor") -> TensorInfo:
    dtype = _DTYPE_NAMES.get(str(tensor.dtype))
    if dtype is None:
        raise ValueError(f"{name} has dtype {tensor.dtype}: expected one of {', '.join(_DTYPE_NAMES)}")
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}: expected a snapshot on the CPU")
    return TensorInfo(
        name=name, dtype=dtype, shape=list(tensor.shape), num_bytes=tensor.numel() * tensor.element_size()
    )


def _tensor_data(tensor: "torch.Tensor") -> memoryview:
    """The tensor's bytes, little-endian, row by row: a view, but for a tensor that is not contiguous."""
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
