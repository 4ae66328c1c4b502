"""Adapters as they travel: names, shapes, and what is added."""

import pytest
import torch

from streamrl.adapters import merge, merged_tensors, why_unfit
from streamrl.digest import version_digest
from streamrl.v1.weights_pb2 import Adapter, TensorInfo, VersionManifest

BASE = VersionManifest(weight_version=0, tensors=[TensorInfo(name="a", shape=[6, 4]), TensorInfo(name="b", shape=[9])])


def adapters(**shapes: list[int]) -> VersionManifest:
    tensors = [TensorInfo(name=name.replace("__", "."), shape=shape) for name, shape in shapes.items()]
    return VersionManifest(weight_version=3, tensors=tensors)


def test_adapters_fit_where_their_product_has_the_shape_of_a_tensor() -> None:
    assert why_unfit(BASE, adapters(a__lora_up=[6, 2], a__lora_down=[2, 4])) is None


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (adapters(c__lora_up=[6, 2], c__lora_down=[2, 4]), "c.lora_up has no tensor in version 0"),
        (adapters(a=[6, 4]), "a has no tensor in version 0"),
        (adapters(a__lora_up=[6, 2]), "a.lora_up comes without its other half"),
        (adapters(a__lora_down=[2, 4]), "a.lora_down comes without its other half"),
        (
            adapters(a__lora_up=[6, 2], a__lora_down=[3, 4]),
            r"a of shape \[6, 4\] has an adapter of \[6, 2\] x \[3, 4\]",
        ),
        (
            adapters(a__lora_up=[4, 2], a__lora_down=[2, 6]),
            r"a of shape \[6, 4\] has an adapter of \[4, 2\] x \[2, 6\]",
        ),
        (adapters(b__lora_up=[9, 1], b__lora_down=[1, 1]), r"b of shape \[9\]"),
    ],
)
def test_adapters_that_cannot_be_added_are_told_by_name(version: VersionManifest, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        raise ValueError(why_unfit(BASE, version))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_has_an_adapter_is_merged_and_the_rest_is_as_it_was(dtype: torch.dtype) -> None:
    base = {"a": torch.randn(6, 4).to(dtype), "b": torch.randn(9).to(dtype)}
    up, down = torch.randn(6, 2).to(dtype), torch.randn(2, 4).to(dtype)
    parts = {"a.lora_down": down, "a.lora_up": up}
    merged = dict(merged_tensors(base.items(), parts.items(), 0.5, torch.device("cpu")))
    assert list(merged) == ["a", "b"] and merged["b"] is base["b"]
    exact = base["a"].double() + 0.5 * up.double() @ down.double()
    assert merged["a"].dtype == dtype
    # A bfloat16 number has eight digits, and the one above or below is taken.
    assert float((merged["a"].double() - exact).abs().max()) <= torch.finfo(dtype).eps * float(exact.abs().max())
    assert torch.equal(merged["a"], merge("a", base["a"], up, down, 0.5))


def test_the_same_adapters_on_another_base_are_another_version() -> None:
    tensors = [TensorInfo(name="a.lora_up", dtype="F32", shape=[6, 2], digest="ab")]
    digests = {
        version_digest(tensors),
        version_digest(tensors, Adapter(base_digest="cd", scaling=2.0)),
        version_digest(tensors, Adapter(base_digest="ce", scaling=2.0)),
        version_digest(tensors, Adapter(base_digest="cd", scaling=2.5)),
    }
    assert len(digests) == 4
    # What a version without adapters has in the field.
    assert version_digest(tensors, VersionManifest().adapter) == version_digest(tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_is_merged_in_stretches_is_merged_to_its_end(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamrl.adapters._STRETCH_ELEMENTS", 10)
    # Columns first, as layers of GPT-2's kind are kept.
    weight, up, down = torch.ones(7, 4).to(dtype).T, torch.ones(4, 1).to(dtype), torch.ones(1, 7).to(dtype)
    assert torch.equal(merge("a", weight, up, down, 2.0), torch.full((4, 7), 3.0, dtype=dtype))
    assert (weight == 1).all()
