"""What packed rows give is what each sample gives alone, padded or not. Flash attention itself needs a GPU; what it is
given is looked at without one."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import MistralConfig, MistralForCausalLM, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from tests.trainer_svc.small_model import small_model
from trainer_svc.critic import ValueModel
from trainer_svc.losses import aggregation_of
from trainer_svc.microbatches import TrainSample, collate
from trainer_svc.packed_attention import (
    attend_by_kernel,
    attend_by_span,
    lay_out,
    take_packed_attention,
    why_no_kernel,
    why_not_packed,
)
from trainer_svc.policy import answer_logprobs, attention_inputs

_AGGREGATION = aggregation_of("token_mean", 16)
_TEMPERATURE = 0.8
Rows = list[list[TrainSample]]


def _rows(groups: list[tuple[int, list[int]]]) -> Rows:
    """Of each a prompt of so many tokens, and answers to it of so many, which share a row."""
    token = iter(range(10**6))

    def tokens(number: int) -> list[int]:
        return [next(token) * 17 % 40 for _ in range(number)]

    rows = []
    for index, (prompt_length, answer_lengths) in enumerate(groups):
        prompt = tokens(prompt_length)
        rows.append(
            [
                TrainSample(
                    (0, index, number), prompt, tokens(length), [-1.0] * length, 1.0 + number - index, [True] * length
                )
                for number, length in enumerate(answer_lengths)
            ]
        )
    return rows


_ROWS = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(1, 12), min_size=1, max_size=4)), min_size=1, max_size=4
).map(_rows)


def _packing_model(*, num_key_value_heads: int = 2) -> Qwen2ForCausalLM:
    model = small_model(num_key_value_heads=num_key_value_heads)
    take_packed_attention(model)
    return model


def _in_dtype(model: Qwen2ForCausalLM, dtype: torch.dtype) -> Qwen2ForCausalLM:
    """The norms of transformers compute in float32 whatever their input is: others take their place."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, Qwen2RMSNorm):
                norm = nn.RMSNorm(len(child.weight), eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(parent, name, norm)
    return model.to(dtype)


def _logprobs_and_gradients(model: Qwen2ForCausalLM, rows: Rows, *, packed: bool) -> tuple[Tensor, list[Tensor]]:
    """Log-probs and entropies of all answers, row by row, and the gradients of a sum that weighs each differently."""
    micro_batch = collate(rows, _AGGREGATION, packed=packed)
    logprobs, entropies = answer_logprobs(model, micro_batch, _TEMPERATURE)
    answers = micro_batch.weights > 0
    gradients = torch.autograd.grad((logprobs * micro_batch.advantages)[answers].sum(), list(model.parameters()))
    return torch.stack([logprobs[answers], entropies[answers]]).detach(), list(gradients)


@settings(max_examples=25, deadline=None)
@given(_ROWS, st.sampled_from([(torch.float64, 1e-9), (torch.float32, 1e-5)]), st.sampled_from([1, 2]))
def test_packed_rows_have_the_log_probs_and_gradients_of_padded_ones(rows, precision, num_key_value_heads):
    dtype, tolerance = precision
    packing = _in_dtype(_packing_model(num_key_value_heads=num_key_value_heads), dtype)
    plain = _in_dtype(small_model(num_key_value_heads=num_key_value_heads), dtype)
    alone = [[sample] for row in rows for sample in row]
    padded, padded_gradients = _logprobs_and_gradients(plain, alone, packed=False)
    # Also a model that packs is given padded rows, masked or not.
    for given_rows, packed in ((rows, True), (alone, True), (rows, False), (alone, False)):
        found, gradients = _logprobs_and_gradients(packing, given_rows, packed=packed)
        torch.testing.assert_close(found, padded, rtol=0, atol=tolerance)
        scale = max(float(gradient.abs().max()) for gradient in padded_gradients)
        for mine, theirs in zip(gradients, padded_gradients, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerance * max(1.0, scale))


def test_packed_rows_have_the_values_of_padded_ones():
    rows = _rows([(5, [3, 7, 1]), (1, [4, 2]), (8, [6])])
    critic, packing = (ValueModel(model).double() for model in (small_model(), _packing_model()))
    for head in (critic.value_head, packing.value_head):
        nn.init.constant_(head.weight, 0.3)
    found = []
    for model, packed in ((critic, False), (packing, True)):
        micro_batch = collate(rows, _AGGREGATION, packed=packed)
        values = model(micro_batch.token_ids, micro_batch.targets - 1, **attention_inputs(micro_batch))
        found.append(values[micro_batch.weights > 0])
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)


def test_spans_of_a_prompt_with_two_answers_and_of_a_sample_alone():
    spans = lay_out([(2, [3, 1]), (4, [2])])
    assert spans.query_bounds.tolist() == [0, 2, 5, 6, 12]
    assert spans.key_bounds.tolist() == [0, 2, 7, 10, 16]
    assert spans.key_positions.tolist() == [0, 1, 0, 1, 2, 3, 4, 0, 1, 5, 6, 7, 8, 9, 10, 11]
    assert (spans.longest_query, spans.longest_keys) == (6, 6)


def test_keys_are_the_rows_tokens_where_nothing_is_shared():
    spans = lay_out([(2, [3]), (0, [1, 2])])
    assert spans.query_bounds.tolist() == spans.key_bounds.tolist() == [0, 5, 6, 8]
    assert spans.key_positions is None


def test_a_span_of_answers_sees_what_a_mask_would_let_it_see():
    tokens = [torch.randn(11, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    seen = torch.zeros(11, 11, dtype=torch.bool)
    for queries, keys in (
        (slice(0, 3), [0, 1, 2]),
        (slice(3, 5), [0, 1, 2, 3, 4]),
        (slice(5, 9), [0, 1, 2, 5, 6, 7, 8]),
    ):
        seen[queries, keys] = True
    seen[9:, 9:] = True
    seen &= torch.ones_like(seen).tril()
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(tensor.transpose(0, 1)[None] for tensor in tokens), attn_mask=seen, scale=0.4
    )
    found = attend_by_span(*tokens, lay_out([(3, [2, 4]), (1, [1])]), 0.4)
    torch.testing.assert_close(found, expected[0].transpose(0, 1), rtol=0, atol=1e-12)


def test_models_that_cannot_pack_are_known():
    assert why_not_packed(small_model()) is None
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    sizes |= {"num_key_value_heads": 1, "intermediate_size": 8}
    assert why_not_packed(MistralForCausalLM(MistralConfig(**sizes, sliding_window=None))) is None
    windowed = MistralForCausalLM(MistralConfig(**sizes, sliding_window=4))
    assert "MistralForCausalLM has another attention than full" in (why_not_packed(windowed) or "")
    eager = MistralForCausalLM(MistralConfig(**sizes, sliding_window=None, attn_implementation="eager"))
    assert "takes no attention function" in (why_not_packed(eager) or "")


def test_where_the_kernel_cannot_run_it_is_said_why():
    config = small_model().config
    assert why_no_kernel(config, torch.device("cpu"), torch.bfloat16) == "there is no GPU"
    of_dtype = why_no_kernel(config, torch.device("cuda", 0), torch.float32)
    assert of_dtype == "model.dtype is float32, and flash attention takes bfloat16"


def test_the_kernel_is_given_tensors_of_the_shapes_and_types_that_it_takes():
    """On tensors without content, by PyTorch's own description of the kernel."""
    spans = lay_out([(5, [3, 7]), (1, [4])]).to(torch.device("meta"))
    query, key, value = (
        torch.empty(20, heads, 16, dtype=torch.bfloat16, device="meta", requires_grad=True) for heads in (4, 2, 2)
    )
    attended = attend_by_kernel(query, key, value, spans, 0.25)
    assert attended.shape == query.shape
    gradients = torch.autograd.grad(attended.sum(), [query, key, value])
    assert [gradient.shape for gradient in gradients] == [query.shape, key.shape, value.shape]


@pytest.mark.gpu
def test_on_a_gpu_the_kernel_gives_what_plain_attention_does():
    device = torch.device("cuda", 0)
    for num_heads, num_key_value_heads, width in ((4, 4, 64), (8, 2, 128)):
        config = SimpleNamespace(
            num_attention_heads=num_heads,
            num_key_value_heads=num_key_value_heads,
            head_dim=width,
            hidden_size=num_heads * width,
        )
        assert why_no_kernel(config, device, torch.bfloat16) is None


@pytest.mark.gpu
def test_on_a_gpu_packed_log_probs_are_those_of_padded_rows_up_to_bfloat16():
    device = torch.device("cuda", 0)
    rows = _rows([(60, [30, 200, 1]), (9, [400]), (300, [17, 90])])
    found = []
    for model, packed in ((small_model(), False), (_packing_model(), True)):
        micro_batch = collate(rows, _AGGREGATION, packed=packed).to(device)
        logprobs, _ = answer_logprobs(model.to(device, torch.bfloat16), micro_batch, _TEMPERATURE)
        found.append(logprobs[micro_batch.weights > 0].float())
    assert float((found[0] - found[1]).abs().mean()) < 0.03
