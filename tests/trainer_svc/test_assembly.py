"""What the settings make of a model, where that depends on the model and on the machine."""

from typing import Any

import pytest
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from tests.trainer_svc.small_model import small_model
from trainer_svc.assembly import networks_of
from trainer_svc.networks import Networks
from trainer_svc.ranks import Ranks
from trainer_svc.settings import TrainerSettings

pytestmark = pytest.mark.filterwarnings("ignore:`torch.distributed:FutureWarning")


class _Model:
    """Model files whose weights are at hand."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def load_model(self) -> PreTrainedModel:
        return self._model


def _networks(model: PreTrainedModel, **trainer: Any) -> Networks:
    settings = TrainerSettings.model_validate({"run": {"id": "r", "dir": "runs"}, "trainer": trainer})
    return networks_of(settings, _Model(model))  # type: ignore[arg-type]


def test_on_cpus_rows_are_packed_where_it_is_asked_for(ranks: Ranks) -> None:
    for packing, packs in (("auto", False), ("off", False), ("on", True)):
        networks = _networks(small_model(), packing=packing)
        assert networks.policy.packs == packs
        networks.close()


def test_packing_is_refused_where_attention_is_of_another_kind(ranks: Ranks) -> None:
    config = Qwen2Config(
        vocab_size=8,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        intermediate_size=8,
        layer_types=["full_attention", "sliding_attention"],
        use_sliding_window=True,
    )
    with pytest.raises(ValueError, match=r"trainer.packing is on: Qwen2ForCausalLM has another attention than full"):
        _networks(Qwen2ForCausalLM(config), packing="on")


def test_offloading_is_refused_where_all_is_in_host_memory(ranks: Ranks) -> None:
    with pytest.raises(ValueError, match=r"trainer.offload is optimizer: this machine trains on its CPUs"):
        _networks(small_model(), offload=["optimizer"])
