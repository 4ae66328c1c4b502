"""Log-probs and entropies of given tokens, without a float32 copy of all logits."""

from typing import Any

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 22
"""Logits that are held in float32 at a time: 16 MiB."""


class _TokenLogprobs(torch.autograd.Function):
    """Log-softmax at the target, in float32, a chunk of rows at a time.

    Saves the logits (which live anyway) and one number a row instead of a float32 softmax of all rows; the backward
    pass computes the softmax again, chunk by chunk, and writes the gradient in the logits' own dtype.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        num_rows, vocabulary_size = logits.shape
        dtype = torch.promote_types(logits.dtype, torch.float32)
        logprobs = torch.empty(num_rows, dtype=dtype, device=logits.device)
        entropies = torch.empty_like(logprobs)
        normalisers = torch.empty_like(logprobs)
        for rows in _chunks(num_rows, vocabulary_size):
            scaled = logits[rows].to(dtype) / temperature
            normalisers[rows] = torch.logsumexp(scaled, dim=-1)
            logprobs[rows] = scaled.gather(-1, targets[rows, None]).squeeze(-1) - normalisers[rows]
            scaled -= normalisers[rows, None]
            probabilities = scaled.exp()
            # 0 * -inf: a token that cannot be drawn adds nothing.
            entropies[rows] = -(probabilities * scaled).nan_to_num_(nan=0.0).sum(dim=-1)
        ctx.save_for_backward(logits, targets, normalisers)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, normalisers = ctx.saved_tensors
        scale = gradients[0] / ctx.temperature
        logits_gradient = torch.empty_like(logits)
        for rows in _chunks(*logits.shape):
            scaled = logits[rows].to(normalisers.dtype) / ctx.temperature
            chunk = (scaled - normalisers[rows, None]).exp_().mul_(-scale[rows, None])
            chunk.scatter_add_(-1, targets[rows, None], scale[rows, None])
            logits_gradient[rows] = chunk.to(logits.dtype)
        return logits_gradient, None, None


def _chunks(num_rows: int, vocabulary_size: int) -> list[slice]:
    size = max(1, _CHUNK_ELEMENTS // vocabulary_size)
    return [slice(start, start + size) for start in range(0, num_rows, size)]


def token_logprobs(logits: Tensor, targets: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs of given tokens, and entropies, of the distribution that is sampled: after temperature.

    Args:
        logits: (..., vocabulary), any float dtype.
        targets: (...), token ids.
        temperature: above 0.

    Returns:
        Log-probs (...), differentiable, and entropies (...), not differentiable, both in nats, float32 or the logits'
        dtype if that is wider.
    """
    shape = targets.shape
    logprobs, entropies = _TokenLogprobs.apply(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), temperature)  # type: ignore[no-untyped-call]
    return logprobs.view(shape), entropies.view(shape)
