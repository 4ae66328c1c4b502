"""How much memory a run takes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from streamrl.command.memory_needs import memory_needs, num_parameters
from streamrl.command.settings import Settings
from streamrl.settings import ModelSection

GIB = 1024**3


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        save_file(
            {"weight": np.zeros((300, 1000), np.float32), "bias": np.zeros(7, np.float32)},
            tmp_path / f"{name}.safetensors",
        )
    return tmp_path


def _needs(model: Path, dtype: str = "float32", **trainer: Any) -> tuple[int, int]:
    settings = Settings(model={"path": str(model), "dtype": dtype}, trainer=trainer)  # type: ignore[arg-type]
    needs = memory_needs(settings)
    assert needs is not None
    return needs.trainer, needs.generators


def test_parameters_are_counted_from_the_headers(model: Path) -> None:
    assert num_parameters(model / "a.safetensors") == 300_007


def test_a_rank_holds_weights_gradients_and_moments(model: Path) -> None:
    count = 2 * 300_007
    assert _needs(model) == (GIB + 16 * count, 4 * GIB + 8 * count)
    assert _needs(model, "bfloat16") == (GIB + 18 * count, 4 * GIB + 4 * count)


def test_zero_shards_more_with_each_stage(model: Path) -> None:
    totals = [_needs(model, num_ranks=4, zero_stage=stage)[0] - 4 * GIB for stage in range(4)]
    count = 2 * 300_007
    assert totals == [64 * count, (8 + 4 * 8) * count, (12 + 4 * 4) * count, 16 * count]


def test_a_critic_is_another_policy_and_a_reference_its_weights_alone(model: Path) -> None:
    count = 2 * 300_007
    assert _needs(model, algorithm="ppo")[0] == GIB + 32 * count
    assert _needs(model, "bfloat16", kl="loss")[0] == GIB + 20 * count
    two = _needs(model, "bfloat16", kl="loss", num_ranks=2)[0] - _needs(model, "bfloat16", num_ranks=2)[0]
    sharded = {"num_ranks": 2, "zero_stage": 3}
    one = _needs(model, "bfloat16", kl="loss", **sharded)[0] - _needs(model, "bfloat16", **sharded)[0]
    assert (two, one) == (4 * count, 2 * count)


def test_what_takes_the_memory_is_told_by_part(model: Path) -> None:
    settings = Settings(model={"path": str(model)}, trainer={"algorithm": "ppo", "kl": "reward"})  # type: ignore[arg-type]
    told = str(memory_needs(settings))
    assert "trainer 1.0 (policy 0.0, critic 0.0, reference 0.0), generators" in told


def test_a_model_that_is_not_here_is_not_counted() -> None:
    assert memory_needs(Settings(model=ModelSection(path="tiny"))) is None


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"12345678oops")
    with pytest.raises(ValueError, match=r"x\.safetensors is no safetensors file"):
        _needs(tmp_path)
