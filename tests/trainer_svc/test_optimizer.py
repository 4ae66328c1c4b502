import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from trainer_svc.optimizer import OptimizerRules, learning_rate_at, parameter_groups


def _rules(schedule="constant", warmup_steps=0, num_steps=10, final_share=0.0, learning_rate=1.0):
    return OptimizerRules(learning_rate, warmup_steps, (0.9, 0.95), 0.0, 1.0, schedule, num_steps, final_share)


def test_the_learning_rate_rises_to_its_value_and_stays():
    rules = _rules(warmup_steps=4)
    assert [learning_rate_at(step, rules) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert learning_rate_at(0, _rules()) == 1.0


def test_a_linear_schedule_falls_by_the_same_each_step():
    rules = _rules("linear", warmup_steps=2, num_steps=6, final_share=0.2)
    rates = [learning_rate_at(step, rules) for step in range(8)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_a_cosine_schedule_is_half_way_at_half_time():
    rules = _rules("cosine", num_steps=8, final_share=0.5)
    assert learning_rate_at(0, rules) == 1.0
    assert learning_rate_at(4, rules) == pytest.approx(0.75)
    assert learning_rate_at(8, rules) == pytest.approx(0.5)
    # PyTorch's own, which falls to its eta_min.
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8, eta_min=0.5)
    for step in range(8):
        assert learning_rate_at(step, rules) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()


@given(
    st.sampled_from(["constant", "linear", "cosine"]),
    st.integers(0, 20),
    st.integers(1, 50),
    st.floats(0, 1),
    st.integers(0, 200),
)
def test_a_rate_lies_between_the_final_one_and_the_highest(schedule, warmup_steps, num_steps, final_share, step):
    rules = _rules(schedule, warmup_steps, num_steps, final_share, learning_rate=3.0)
    rate = learning_rate_at(step, rules)
    assert 0 <= rate <= 3.0 + 1e-12
    if step >= warmup_steps:
        assert rate >= 3.0 * final_share - 1e-12 or schedule == "constant"


@pytest.mark.parametrize("tied", [False, True])
def test_matrices_decay_and_norms_biases_and_embeddings_do_not(tied):
    config = Qwen2Config(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    config.tie_word_embeddings = tied
    model = Qwen2ForCausalLM(config)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = {
        group["weight_decay"]: {names[id(parameter)] for parameter in group["params"]}
        for group in parameter_groups(model, 0.1)
    }
    layer = "model.layers.0."
    projections = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    matrices = {f"{layer}{name}.weight" for name in (*projections, "mlp.gate_proj", "mlp.down_proj")}
    assert groups[0.1] == matrices | (set() if tied else {"lm_head.weight"})
    others = {name for name, parameter in model.named_parameters() if parameter.requires_grad} - groups[0.1]
    assert groups[0.0] == others
    assert {"model.embed_tokens.weight", "model.norm.weight", f"{layer}self_attn.q_proj.bias"} <= others


def test_without_decay_there_is_one_group():
    model = nn.Linear(2, 2)
    assert [group["weight_decay"] for group in parameter_groups(model, 0.0)] == [0.0]
    # A group of no parameters is none.
    assert len(parameter_groups(nn.Linear(2, 2, bias=False), 0.1)) == 1
