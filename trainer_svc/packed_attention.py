"""Attention in a row without padding: answers stand one behind the other, and each sees its prompt and itself alone.

A row is cut into spans of queries: prompts, and the answers to them. The keys of a span are its own tokens, behind
those of the prompt that it continues, so a prompt that stands there once serves all its answers, and nothing is
computed of pairs that may not see each other. On GPUs a row is one call of PyTorch's variable-length flash attention;
elsewhere each span is a call of plain attention, which gives the same numbers.

transformers lets a model take an attention function by name: `take_packed_attention` gives it this one. Calls without
spans (padded rows, with a mask or without) are those of its own `sdpa`. What stands where in a row is decided in
trainer_svc/microbatches.py.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

PACKED = "streamrl_packed"
"""Name of the attention function."""

_TRIAL = ((150, (70, 200)), (0, (90,)), (30, (1, 129)))
"""Rows that the kernel is tried on, as `lay_out` takes them: spans on both sides of the sizes of its blocks."""
_TRIAL_TOLERANCE = 0.03
"""Largest relative difference to plain attention, in norm: several times bfloat16's rounding, a tenth of what one token
too many or too few makes."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Which queries of a row see which keys: in each span the last query sees all keys of the span, the one before it
    all but the last, and so on."""

    query_bounds: Tensor
    """(spans + 1,), int32: where spans begin among the row's tokens, and where the last ends."""
    key_bounds: Tensor
    """(spans + 1,), int32: the same among the keys."""
    key_positions: Tensor | None
    """(keys,), int64: which token of the row each key is of. None: keys are the row's tokens, each once."""
    longest_query: int
    """Tokens of the longest span."""
    longest_keys: int

    def to(self, device: torch.device) -> Self:
        """The same on another device."""
        positions = self.key_positions
        return replace(
            self,
            query_bounds=self.query_bounds.to(device, non_blocking=True),
            key_bounds=self.key_bounds.to(device, non_blocking=True),
            key_positions=None if positions is None else positions.to(device, non_blocking=True),
        )


def lay_out(rows: Sequence[tuple[int, Sequence[int]]]) -> Spans:
    """The spans of rows that stand one behind the other.

    Args:
        rows: of each the number of tokens that all its blocks see, and of each block its number of tokens.
    """
    num_queries: list[int] = []
    keys: list[Tensor] = []
    position = 0
    for shared, blocks in rows:
        prompt = torch.arange(position, position + shared)
        if len(blocks) == 1:
            # It goes on where the shared part ends: one span.
            num_queries.append(shared + blocks[0])
            keys.append(torch.arange(position, position + shared + blocks[0]))
            position += shared + blocks[0]
            continue
        if shared:
            num_queries.append(shared)
            keys.append(prompt)
        position += shared
        for block in blocks:
            num_queries.append(block)
            keys.append(torch.cat([prompt, torch.arange(position, position + block)]))
            position += block
    num_keys = [len(positions) for positions in keys]
    return Spans(
        query_bounds=_bounds(num_queries),
        key_bounds=_bounds(num_keys),
        key_positions=None if num_keys == num_queries else torch.cat(keys),
        longest_query=max(num_queries),
        longest_keys=max(num_keys),
    )


def _bounds(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def has_full_attention(config: Any) -> bool:
    """Whether every token of a transformers model sees all before it, in every layer."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return getattr(config, "sliding_window", None) is None
    return set(kinds) == {"full_attention"}


def why_not_packed(model: Any) -> str | None:
    """What keeps a model of transformers from this attention; None: nothing."""
    config = model.config
    # Latent attention has values of another width than its keys, which flash attention does not take.
    if not has_full_attention(config) or hasattr(config, "v_head_dim"):
        return f"{type(model).__name__} has another attention than full, causal attention in all its layers"
    if config._attn_implementation != "sdpa" or not model._supports_attention_backend:
        return f"{type(model).__name__} takes no attention function of others in transformers"
    return None


def take_packed_attention(model: Any) -> None:
    """Gives this attention to a model that nothing keeps from it."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED, _attention)
    model.set_attn_implementation(PACKED)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    spans: Spans | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it: (rows, heads, tokens, width) to (rows, tokens, heads, width). With spans there is one
    row, and no mask."""
    if spans is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
    assert attention_mask is None and options.get("position_bias") is None, "attention that spans do not say"
    attend = attend_by_kernel if query.device.type == "cuda" else attend_by_span
    query, key, value = (tensor.squeeze(0).transpose(0, 1) for tensor in (query, key, value))
    return attend(query, key, value, spans, options.get("scaling"))[None], None


def attend_by_kernel(query: Tensor, key: Tensor, value: Tensor, spans: Spans, scaling: float | None) -> Tensor:
    """One call of PyTorch's flash attention, on a GPU in bfloat16.

    Args:
        query: (tokens, heads, width).
        key, value: (tokens, heads or a divisor of them, width).
        scaling: of products of queries and keys; None: 1 / sqrt(width).

    Returns:
        (tokens, heads, width).
    """
    from torch.nn.attention.varlen import varlen_attn

    attended = varlen_attn(
        query,
        _of_keys(key, spans),
        _of_keys(value, spans),
        spans.query_bounds,
        spans.key_bounds,
        spans.longest_query,
        spans.longest_keys,
        scale=scaling,
        # Causal; where a span has more keys than queries, their ends meet.
        window_size=(-1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(attended, Tensor)
    return attended


def attend_by_span(query: Tensor, key: Tensor, value: Tensor, spans: Spans, scaling: float | None) -> Tensor:
    """The same in a call of plain attention for each span, on any device and in any dtype."""
    num_queries, num_keys = spans.query_bounds.diff().tolist(), spans.key_bounds.diff().tolist()
    # Split, not sliced: the gradient of each slice would be as long as the row.
    parts = zip(
        torch.split(query, num_queries),
        torch.split(_of_keys(key, spans), num_keys),
        torch.split(_of_keys(value, spans), num_keys),
        strict=True,
    )
    return torch.cat([_attend_in_span(*of_span, scaling) for of_span in parts])


def _attend_in_span(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    mask = None
    if len(query) < len(key):
        every = torch.ones(len(query), len(key), dtype=torch.bool, device=query.device)
        mask = every.tril(len(key) - len(query))
    attended = nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended[0].transpose(0, 1)


def _of_keys(tensor: Tensor, spans: Spans) -> Tensor:
    if spans.key_positions is None:
        return tensor
    # Wide on the way: gradients of a prompt's keys are summed over its answers.
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return wide.index_select(0, spans.key_positions).to(tensor.dtype)


def why_no_kernel(config: Any, device: torch.device, dtype: torch.dtype) -> str | None:
    """What keeps the kernel from a model with this config; None: it gives what plain attention does.

    It is tried, forward and backward, on rows like those of a run: so nothing has to be known of which builds of
    PyTorch and which GPUs have it, and one that is wrong on some hardware is not used there.
    """
    if device.type != "cuda":
        return "there is no GPU"
    if dtype != torch.bfloat16:
        return f"model.dtype is {str(dtype).removeprefix('torch.')}, and flash attention takes bfloat16"
    num_heads = config.num_attention_heads
    num_key_heads = getattr(config, "num_key_value_heads", None) or num_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    num_tokens = sum(shared + sum(blocks) for shared, blocks in _TRIAL)
    # Of its own: the run's random numbers stay what they are.
    generator = torch.Generator(device).manual_seed(0)
    # The last is where the gradient comes from.
    inputs = [
        torch.randn(num_tokens, heads, width, device=device, dtype=dtype, generator=generator)
        for heads in (num_heads, num_key_heads, num_key_heads, num_heads)
    ]
    spans = lay_out(_TRIAL).to(device)
    try:
        found = _trial(attend_by_kernel, inputs, spans)
    except (RuntimeError, ImportError) as error:
        return f"flash attention does not run here: {str(error).splitlines()[0]}"
    expected = _trial(attend_by_span, inputs, spans)
    differences = [(mine - theirs).norm() / theirs.norm() for mine, theirs in zip(found, expected, strict=True)]
    off = float(torch.stack(differences).max())
    # Not "above": a difference may be no number.
    return None if off <= _TRIAL_TOLERANCE else f"flash attention is off by {off:.2g} here, relative to plain attention"


def _trial(attend: Callable[..., Tensor], inputs: Sequence[Tensor], spans: Spans) -> list[Tensor]:
    """What is attended, and the gradients of queries, keys and values; float32."""
    *leaves, direction = inputs
    leaves = [tensor.detach().requires_grad_() for tensor in leaves]
    attended = attend(*leaves, spans, None)
    gradients = torch.autograd.grad((attended * direction).sum(), leaves)
    return [tensor.detach().float() for tensor in (attended, *gradients)]
