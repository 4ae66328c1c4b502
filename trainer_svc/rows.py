"""Which answers share a row of a micro-batch: those of one prompt, which is computed once for all of them. Pure.

A row is the prompt without its last token, then for each answer that token and the answer. Every answer sees the prompt
and itself alone (microbatches.py says how), so that all log-probs and gradients are those of rows of their own, and the
prompt costs one pass instead of one for each answer. What it costs instead is attention: under a mask a long row of
many answers computes all pairs of its tokens, also those that may not see each other. `RowCost` weighs the two. Packed
rows have no mask, and attention in them costs no more than in rows apart.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainer_svc.microbatches import TrainSample, row_tokens
from trainer_svc.packed_attention import PACKED, has_full_attention

_LONGEST_MASKED = 8192
"""Tokens: the mask of a shared row has the square of its length in bytes."""


@dataclass(frozen=True, slots=True)
class Row:
    """Answers to one prompt."""

    samples: tuple[TrainSample, ...]

    @property
    def identity(self) -> tuple[int, int, int]:
        return self.samples[0].identity

    @property
    def num_tokens(self) -> int:
        return row_tokens(self.samples)


@dataclass(frozen=True, slots=True)
class RowCost:
    """Multiply-adds of a forward pass, about: what is compared when answers may share a row."""

    each_token: float
    """Of a token, attention between tokens apart: the parameters that it meets."""
    each_pair: float
    """Of one token's attention to another, over all layers."""
    longest_shared: float = _LONGEST_MASKED
    """Tokens that a row of several answers may have."""

    def __call__(self, num_tokens: int, *, shared: bool) -> float:
        # Plain causal attention computes half of the pairs, attention with a mask all.
        pairs = num_tokens**2 if shared else num_tokens**2 / 2
        return num_tokens * self.each_token + pairs * self.each_pair


def row_cost_of(config: Any, num_parameters: int) -> RowCost | None:
    """The cost of rows of a transformers model; None: its attention takes no mask of ours, so that no row is shared.

    Args:
        config: the model's.
        num_parameters: of the whole model.
    """
    if config._attn_implementation == PACKED:
        return RowCost(float(num_parameters), 0.0, math.inf)
    if config._attn_implementation != "sdpa" or not has_full_attention(config):
        return None
    return RowCost(float(num_parameters), 2.0 * config.hidden_size * config.num_hidden_layers)


def make_rows(samples: Sequence[TrainSample], cost: RowCost | None, max_tokens: int) -> list[Row]:
    """Puts every sample into one row, several of one group where that is cheaper. The same samples make the same rows
    whatever order they come in.

    Args:
        cost: None: each sample has a row of its own.
        max_tokens: a row is not made longer than this by sharing.
    """
    groups: dict[tuple[int, int], list[TrainSample]] = {}
    for sample in sorted(samples, key=lambda sample: (-sample.num_tokens, sample.identity)):
        groups.setdefault(sample.identity[:2], []).append(sample)
    rows = []
    for group in groups.values():
        row: list[TrainSample] = []
        for sample in group:
            if row and not _pays(row, sample, cost, max_tokens):
                rows.append(Row(tuple(row)))
                row = []
            row.append(sample)
        rows.append(Row(tuple(row)))
    return rows


def _pays(row: Sequence[TrainSample], sample: TrainSample, cost: RowCost | None, max_tokens: int) -> bool:
    before = row_tokens(row)
    after = row_tokens([*row, sample])
    if cost is None or after > min(max_tokens, cost.longest_shared):
        return False
    apart = cost(before, shared=len(row) > 1) + cost(sample.num_tokens, shared=False)
    return cost(after, shared=True) < apart
