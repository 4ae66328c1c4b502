"""Counted against real models: what autograd keeps, and what DeepSpeed holds."""

import dataclasses
import gc

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from trainer_svc.adapters import LoraRules, add_adapters
from trainer_svc.losses import OFF_POLICY, SURROGATES, ClipRange, PolicyObjective, aggregation_of
from trainer_svc.memory_plan import ModelShape, Practice, activation_bytes, rank_memory, size_text
from trainer_svc.microbatches import TrainSample, collate
from trainer_svc.optimizer import OptimizerRules
from trainer_svc.policy import Policy
from trainer_svc.sharded_model import Sharding
from trainer_svc.token_logprobs import token_logprobs

_PRACTICE = Practice(
    dtype="float32",
    num_ranks=1,
    zero_stage=0,
    pass_tokens=1000,
    has_critic=False,
    has_reference=False,
    gradient_checkpointing=False,
    offload_optimizer=False,
    offload_reference=False,
    lora_rank=0,
    lora_targets=(),
)
_SIZES = {
    "vocab_size": 500,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 320,
    "tie_word_embeddings": False,
}


def _qwen():
    return Qwen2ForCausalLM(Qwen2Config(**_SIZES))


def _shape(model):
    return ModelShape(
        {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}, model.config.to_dict()
    )


@pytest.mark.parametrize("make", [_qwen, lambda: LlamaForCausalLM(LlamaConfig(**_SIZES))])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_about_what_autograd_keeps(make, dtype, checkpointing):
    model = make().to(getattr(torch, dtype)).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            # Held: freed memory would be counted again under the same address.
            kept[storage.data_ptr()] = storage
        return tensor

    token_ids = torch.randint(500, (5, 200))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(input_ids=token_ids, use_cache=False).logits
        token_logprobs(logits, token_ids, temperature=1.0)
    # The logits' gradient comes on top, and one layer's activations where they are computed again.
    measured = sum(storage.nbytes() for storage in kept.values()) + logits.nbytes
    practice = dataclasses.replace(_PRACTICE, dtype=dtype)
    if checkpointing:
        layers = [
            activation_bytes({**_shape(model).config, "num_hidden_layers": number}, practice) for number in (1, 0)
        ]
        measured += layers[0] - layers[1]
    planned = activation_bytes(
        _shape(model).config, dataclasses.replace(practice, gradient_checkpointing=checkpointing)
    )
    assert planned == pytest.approx(measured, rel=0.15)


def _live_storages():
    """By address; held, so that nothing new gets the address of what is freed."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if isinstance(found, torch.Tensor):
            for tensor in (found, found.grad if found.is_leaf else None):
                if tensor is not None:
                    storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
    return storages


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("zero_stage", "dtype", "lora_rank"),
    [
        (0, "float32", 0),
        (2, "bfloat16", 8),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1, "float32", 8), (2, "float32", 0), (1, "bfloat16", 0))
        ),
    ],
)
def test_weights_gradients_and_optimizer_are_what_deepspeed_holds(ranks, zero_stage, dtype, lora_rank):
    before = _live_storages()
    model = _qwen()
    if lora_rank:
        add_adapters(model, LoraRules(lora_rank, 16.0))
    policy = Policy(
        model,
        objective=PolicyObjective(SURROGATES["grpo"], ClipRange(0.2, 0.2), OFF_POLICY["ratio"], 2.0),
        temperature=1.0,
        rules=OptimizerRules(1e-3, 0, (0.9, 0.95), 0.1, 1.0),
        sharding=Sharding(zero_stage, dtype),
    )
    aggregation = aggregation_of("token_mean", 16)
    sample = TrainSample((0, 0, 0), [1] * 4, [2] * 8, [-1.0] * 8, 1.0, [True] * 8)
    for _ in range(2):
        policy.step(1.0)
        policy.accumulate(collate([[sample]], aggregation))
    held = sum(storage.nbytes() for address, storage in _live_storages().items() if address not in before)
    policy.close()
    practice = dataclasses.replace(_PRACTICE, dtype=dtype, zero_stage=zero_stage, lora_rank=lora_rank)
    planned = rank_memory(_shape(_qwen()), practice)
    assert planned.actor + planned.optimizers == pytest.approx(held, rel=0.15)


def _planned(**changes):
    return rank_memory(_shape(_qwen()), dataclasses.replace(_PRACTICE, **changes))


def test_zero_shards_more_with_each_stage():
    stages = [_planned(zero_stage=stage, num_ranks=4) for stage in range(4)]
    assert stages[1].optimizers < stages[0].optimizers
    assert stages[2].actor < stages[1].actor
    count = _shape(_qwen()).num_parameters
    assert stages[1].optimizers == 12 * count // 4
    assert stages[2].actor == 4 * count + 4 * count // 4


def test_a_critic_is_another_actor_and_a_reference_its_weights_alone():
    count = _shape(_qwen()).num_parameters
    plain, both = _planned(), _planned(has_critic=True, has_reference=True)
    assert (both.critic, both.reference, both.optimizers) == (plain.actor, 4 * count, 2 * plain.optimizers)
    assert both.peak - plain.peak == plain.actor + 4 * count + plain.optimizers


def test_what_is_offloaded_is_there_at_other_times_than_activations():
    away = {"offload_optimizer": True, "offload_reference": True}
    there = _planned(has_reference=True)
    moved = _planned(has_reference=True, **away)
    largest = max(moved.activations, moved.optimizers, moved.reference)
    assert moved.peak == moved.actor + largest
    assert there.peak == there.actor + there.optimizers + there.reference + there.activations


def test_adapters_take_a_small_part_of_gradients_and_optimizer():
    adapters = _shape(_qwen()).num_adapter_parameters(8, ())
    model = _qwen()
    add_adapters(model, LoraRules(8, 16.0))
    assert adapters == sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert _planned(lora_rank=8).optimizers == 8 * adapters
    some = _shape(_qwen()).num_adapter_parameters(8, ("q_proj", "down_proj"))
    assert some == 4 * 8 * (128 + 128 + 320 + 128)


@pytest.mark.parametrize("target", ["qproj", "lm_head"])
def test_adapters_on_layers_that_are_not_there_are_refused_before_the_model_is_loaded(target):
    with pytest.raises(ValueError, match=rf"trainer\.lora_targets: {target}: expected .*q_proj"):
        _planned(lora_rank=8, lora_targets=("q_proj", target))


def test_a_config_of_another_form_has_no_known_activations():
    assert activation_bytes({"hidden_size": 8}, _PRACTICE) == 0


def test_sizes_are_told_in_the_unit_that_fits():
    assert [size_text(size) for size in (1, 5 * 2**20, 3 * 2**29)] == ["1 MiB", "5 MiB", "1.5 GiB"]
