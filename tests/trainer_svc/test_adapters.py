"""LoRA on models of transformers; how it learns on DeepSpeed is in test_policy_adapters.py."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from streamrl.adapters import merged_tensors
from trainer_svc.adapters import LoraRules, add_adapters, published_tensors, without_adapters

_TOKENS = torch.tensor([[3, 7, 1, 9, 4]])


def _qwen(tied=False):
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=20,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=24,
            tie_word_embeddings=tied,
            initializer_range=0.3,
        )
    )


def _gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=16, n_layer=2, n_head=2, n_positions=16)).eval()


def _disturb(model):
    """Adapters that have learnt something: they begin as nothing."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)


def _merged(model):
    with torch.no_grad():
        return {tensor.name: tensor.value().clone() for tensor in published_tensors(model)}


@pytest.mark.parametrize("make", [_qwen, _gpt2, lambda: _qwen(tied=True)])
def test_the_published_weights_are_those_of_a_plain_model_that_says_the_same(make):
    model, plain = make(), make()
    add_adapters(model, LoraRules(rank=3, alpha=5.0))
    assert torch.equal(model(input_ids=_TOKENS).logits, plain(input_ids=_TOKENS).logits)
    _disturb(model)
    logits = model(input_ids=_TOKENS).logits
    assert (logits - plain(input_ids=_TOKENS).logits).abs().max() > 0.1
    weights = _merged(model)
    assert set(weights) == {name for name, _ in plain.named_parameters()}
    plain.load_state_dict(weights, strict=False)
    torch.testing.assert_close(plain(input_ids=_TOKENS).logits, logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [_qwen, _gpt2, lambda: _qwen(tied=True)])
def test_adapters_published_alone_make_the_same_weights_of_the_frozen_ones(make):
    model, plain = make(), make()
    add_adapters(model, LoraRules(rank=3, alpha=5.0))
    _disturb(model)
    with torch.no_grad():
        frozen = {tensor.name: tensor.value() for tensor in published_tensors(model, "frozen")}
        adapters = {tensor.name: tensor.value().contiguous() for tensor in published_tensors(model, "adapters")}
        made = dict(merged_tensors(frozen.items(), adapters.items(), 5.0 / 3.0, torch.device("cpu")))
    assert all(torch.equal(frozen[name], tensor) for name, tensor in plain.named_parameters())
    assert len(adapters) == len([name for name, _ in model.named_parameters() if ".lora_" in name])
    assert sum(map(torch.numel, adapters.values())) < sum(map(torch.numel, frozen.values()))
    merged = _merged(model)
    assert list(made) == list(merged)
    for name, tensor in merged.items():
        torch.testing.assert_close(made[name], tensor)


def test_what_learns_as_a_whole_is_not_left_out_beside_adapters_that_are_published_alone():
    model = _qwen()
    add_adapters(model, LoraRules(rank=3, alpha=5.0))
    model.lm_head.weight.requires_grad_(True)
    with pytest.raises(AssertionError, match=r"lm_head\.weight learns as a whole"):
        list(published_tensors(model, "adapters"))


def test_without_its_adapters_a_model_is_the_initial_one():
    model, plain = _qwen(), _qwen()
    add_adapters(model, LoraRules(rank=3, alpha=5.0))
    _disturb(model)
    before = model(input_ids=_TOKENS).logits
    learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    with without_adapters(model):
        assert torch.equal(model(input_ids=_TOKENS).logits, plain(input_ids=_TOKENS).logits)
    assert torch.equal(model(input_ids=_TOKENS).logits, before)
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == learning


def test_adapters_alone_learn():
    model = _qwen()
    add_adapters(model, LoraRules(rank=3, alpha=5.0))
    learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert learning
    assert all(".lora_A." in name or ".lora_B." in name for name in learning)
    # Two of each of seven layers in each of two blocks; not the output layer.
    assert len(learning) == 2 * 7 * 2


def test_only_the_named_layers_get_adapters():
    model = _qwen()
    add_adapters(model, LoraRules(rank=2, alpha=4.0, targets=("q_proj", "down_proj")))
    adapted = {name.split(".lora_")[0].rpartition(".")[2] for name, _ in model.named_parameters() if "lora_" in name}
    assert adapted == {"q_proj", "down_proj"}


@pytest.mark.parametrize("target", ["qproj", "lm_head", "embed_tokens", "norm"])
def test_a_layer_that_cannot_have_an_adapter_is_refused_by_name(target):
    with pytest.raises(ValueError, match=rf"trainer\.lora_targets: {target}: expected .*down_proj"):
        add_adapters(_qwen(), LoraRules(rank=2, alpha=4.0, targets=("q_proj", target)))


def _merged_bfloat16(value, down, up):
    """Of q_proj, whose weights are `value`, with an adapter that adds down x up to each."""
    model = _qwen().to(torch.bfloat16)
    add_adapters(model, LoraRules(rank=1, alpha=1.0, targets=("q_proj",)))
    layer = model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.base_layer.weight.fill_(value)
        layer.lora_A["default"].weight.fill_(down)
        layer.lora_B["default"].weight.fill_(up)
    merged = _merged(model)["model.layers.0.self_attn.q_proj.weight"]
    assert merged.dtype == torch.bfloat16
    return merged.double()


def test_what_adds_nothing_leaves_bfloat16_weights_as_they_are():
    assert (_merged_bfloat16(0.3, 0.5, 0.0) == torch.tensor(0.3, dtype=torch.bfloat16)).all()


@pytest.mark.parametrize("value", [1.5, -1.5])
def test_changes_below_the_last_digit_of_a_bfloat16_weight_show_on_average(value):
    """A quarter of the way to the next number: a quarter of the weights take it, and more of them when it is half."""
    last_digit = 2.0**-7
    quarter, half = _merged_bfloat16(value, 2.0**-4, 2.0**-5), _merged_bfloat16(value, 2.0**-4, 2.0**-4)
    for merged, share in ((quarter, 0.25), (half, 0.5)):
        assert set((merged - value).unique().tolist()) == {0.0, last_digit}
        assert float((merged != value).double().mean()) == pytest.approx(share, abs=0.1)
    assert (half[quarter != value] != value).all()
