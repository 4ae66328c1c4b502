"""What a version consists of."""

from typing import Any

import torch

from streamrl.v1.weights_pb2 import Adapter, Canary, ModelFile
from trainer_svc.publisher import Snapshot
from trainer_svc.snapshots import AdapterVersions, WholeVersions

FILES = [ModelFile(name="config.json", content=b"{}")]
CANARIES = [Canary(token_ids=[1, 2], logprobs=[-0.5])]


class Source:
    """Weights that are called as they were asked for."""

    def weights(self, form: str = "merged") -> list[tuple[str, torch.Tensor]]:
        return [(form, torch.ones(1))]


class Service:
    """The publisher's side, as far as it is asked."""

    def __init__(self) -> None:
        self.base_digest = ""
        self.provided: list[Snapshot] = []

    def provide_base(self, snapshot: Snapshot) -> None:
        self.provided.append(snapshot)
        self.base_digest = "base"


def made_of(snapshot: Snapshot) -> list[str]:
    return [name for name, _ in snapshot.tensors]


def test_whole_versions_are_plain_models() -> None:
    snapshot = WholeVersions(Source()).take(4, FILES, CANARIES)
    assert made_of(snapshot) == ["merged"] and (snapshot.adapter, snapshot.is_base) == (None, False)
    assert (snapshot.weight_version, snapshot.files, snapshot.canaries) == (4, FILES, CANARIES)


def test_the_first_version_is_what_the_adapters_of_later_ones_are_added_to() -> None:
    service: Any = Service()
    versions = AdapterVersions(Source(), service, 2.0)
    first = versions.take(0, FILES, CANARIES)
    assert made_of(first) == ["frozen"] and first.is_base and first.adapter is None
    service.base_digest = "announced"
    second = versions.take(1, (), CANARIES)
    assert made_of(second) == ["adapters"] and not second.is_base and second.canaries == CANARIES
    assert second.adapter == Adapter(base_weight_version=0, base_digest="announced", scaling=2.0)
    assert service.provided == []


def test_an_attempt_that_goes_on_sees_to_the_base_once() -> None:
    service: Any = Service()
    versions = AdapterVersions(Source(), service, 2.0)
    for number in (7, 8):
        snapshot = versions.take(number, FILES, ())
        assert snapshot.adapter == Adapter(base_weight_version=0, base_digest="base", scaling=2.0)
    [base] = service.provided
    assert (base.weight_version, made_of(base), base.is_base, base.files) == (0, ["frozen"], True, FILES)
