"""How much memory a run takes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from streamrl.command.memory_needs import MemoryNeeds, memory_needs, parameter_shapes
from streamrl.command.settings import Settings
from streamrl.settings import ModelSection, RunSection
from trainer_svc.tiny_model import tiny_model_place

GIB = 1024**3
COUNT = 2 * 300_007


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        tensors = {f"{name}.weight": np.zeros((300, 1000), np.float32), f"{name}.bias": np.zeros(7, np.float32)}
        save_file(tensors, tmp_path / f"{name}.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "other"}))
    return tmp_path


def _needs(model: Path, dtype: str = "float32", **trainer: Any) -> MemoryNeeds:
    settings = Settings(model={"path": str(model), "dtype": dtype}, trainer=trainer)  # type: ignore[arg-type]
    needs = memory_needs(settings)
    assert needs is not None
    return needs


def test_shapes_are_read_from_the_headers(model: Path) -> None:
    assert parameter_shapes(model / "a.safetensors") == {"a.weight": (300, 1000), "a.bias": (7,)}


def test_a_machine_of_cpus_holds_every_rank_a_snapshot_and_the_engines(model: Path) -> None:
    needs = _needs(model)
    assert needs.trainer == GIB + needs.rank.peak + 4 * COUNT
    assert needs.generators == 4 * GIB + 8 * COUNT
    two = _needs(model, num_ranks=2)
    assert two.trainer == 2 * (GIB + two.rank.peak) + 4 * COUNT


def test_the_settings_decide_what_there_is(model: Path) -> None:
    assert _needs(model).rank.critic == 0
    assert _needs(model, algorithm="ppo").rank.critic == _needs(model).rank.actor
    assert _needs(model, kl="loss").rank.reference == 4 * COUNT
    # The policy without its adapters is the reference.
    assert _needs(model, kl="loss", lora_rank=4).rank.reference == 0
    assert _needs(model, lora_rank=4).rank.optimizers == 8 * 4 * 2 * 1300
    assert _needs(model, lora_rank=4, lora_targets=["a"]).rank.optimizers == 8 * 4 * 1300
    # Of two optimizers one is there at a time.
    both = {"algorithm": "ppo"}
    assert _needs(model, **both, offload=["optimizer"]).rank.peak < _needs(model, **both).rank.peak


def test_what_is_offloaded_is_on_the_host_of_gpus(model: Path) -> None:
    kept = _needs(model, kl="loss", num_ranks=4, num_nodes=2)
    assert kept.trainer_host == 2 * GIB + 4 * COUNT
    moved = _needs(model, kl="loss", num_ranks=4, num_nodes=2, offload=["optimizer", "reference"])
    assert moved.trainer_host == kept.trainer_host + 2 * (8 + 4) * COUNT
    assert moved.rank.resting == kept.rank.resting - (8 + 4) * COUNT == moved.rank.actor


def test_an_answer_that_is_longer_than_a_micro_batch_is_counted_whole(tmp_path: Path) -> None:
    save_file({"a.weight": np.zeros((4, 4), np.float32)}, tmp_path / "a.safetensors")
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "vocab_size": 9,
        "intermediate_size": 8,
        "num_attention_heads": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(sizes))

    def activations(micro_batch_tokens: int, **generator: int) -> int:
        settings = Settings.model_validate(
            {
                "model": {"path": str(tmp_path)},
                "data": {"max_prompt_tokens": 1000},
                "generator": generator,
                "trainer": {"micro_batch_tokens": micro_batch_tokens},
            }
        )
        needs = memory_needs(settings)
        assert needs is not None
        return needs.rank.activations

    assert activations(4000, max_tokens=7000) == activations(8000, max_tokens=10) > 0
    assert activations(4000, max_tokens=7000, max_model_len=7500) == activations(7500, max_tokens=10)


def test_what_takes_the_memory_is_told_by_part(model: Path) -> None:
    told = str(_needs(model, algorithm="ppo", kl="reward"))
    assert "trainer 1.0 GiB, generators 4.0 GiB" in told
    assert "(actor 5 MiB, critic 5 MiB, reference 3 MiB, optimizers 10 MiB, and activations, which" in told
    assert "a snapshot of 3 MiB" in told


def test_a_model_that_is_not_here_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for path in ("tiny", "streamrl-tests/no-such-model", "package:no_such_package", "no/such/folder/of/a/model"):
        assert memory_needs(Settings(model=ModelSection(path=path))) is None


def test_a_model_that_was_made_before_is_counted(
    model: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    place = tiny_model_place(cache / "streamrl", seed=5)
    place.parent.mkdir(parents=True)
    place.symlink_to(model)
    needs = memory_needs(Settings(model=ModelSection(path="tiny"), run=RunSection(seed=5)))
    assert needs is not None and needs.num_parameters == COUNT


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"12345678oops")
    with pytest.raises(ValueError, match=r"x\.safetensors is no safetensors file"):
        _needs(tmp_path)
