"""What a weight version consists of when it leaves the trainer: the whole model, or what adapters add to a base.

Every version is copied out between two steps, by all ranks, on the training thread; publisher.py sends it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from streamrl.v1.weights_pb2 import Adapter, Canary, ModelFile
from trainer_svc.adapters import WeightForm
from trainer_svc.publisher import Publisher, Snapshot

if TYPE_CHECKING:
    from torch import Tensor

_BASE_VERSION = 0
"""The initial model, which adapters learn beside; they begin as nothing, so it is a version like others."""


class WeightSource(Protocol):
    """The learner, as far as versions need it."""

    def weights(self, form: WeightForm = "merged") -> list[tuple[str, "Tensor"]]: ...


class Snapshots(Protocol):
    """How versions are made."""

    def take(self, weight_version: int, files: Sequence[ModelFile], canaries: Sequence[Canary]) -> Snapshot:
        """The present weights. Everything that was submitted before is announced.

        Args:
            files: config and tokenizer, with an attempt's first version.
        """


class WholeVersions:
    """Each version is a plain model, adapters merged."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def take(self, weight_version: int, files: Sequence[ModelFile], canaries: Sequence[Canary]) -> Snapshot:
        return Snapshot(weight_version, self._source.weights(), files, canaries)


class AdapterVersions:
    """Version 0 is the model that adapters learn beside; each later one has the adapters alone."""

    def __init__(self, source: WeightSource, publisher: Publisher, scaling: float) -> None:
        """
        Args:
            scaling: what an adapter adds is multiplied by it.
        """
        self._source = source
        self._publisher = publisher
        self._scaling = scaling
        publisher.make_base = self._base

    def take(self, weight_version: int, files: Sequence[ModelFile], canaries: Sequence[Canary]) -> Snapshot:
        """As `Snapshots.take`. The first of an attempt sees to it that weights_svc holds the base.

        Raises:
            PublishError: it cannot be published.
        """
        if weight_version == _BASE_VERSION:
            return self._base(files, canaries)
        if not self._publisher.base_digest:
            self._publisher.provide_base(self._base(files))
        adapter = Adapter(
            base_weight_version=_BASE_VERSION, base_digest=self._publisher.base_digest, scaling=self._scaling
        )
        return Snapshot(weight_version, self._source.weights("adapters"), files, canaries, adapter)

    def _base(self, files: Sequence[ModelFile] = (), canaries: Sequence[Canary] = ()) -> Snapshot:
        return Snapshot(_BASE_VERSION, self._source.weights("frozen"), files, canaries, is_base=True)
