"""The ranker's networks: token ids of prompts to the rates at which their answers end.

`SmallNetwork` is a transformer of two narrow layers made from scratch: it learns in minutes on a core and scores a
thousand prompts a second. `BaseModelNetwork` stands on a causal language model of the policy's tokens. Both end in the
same head, which begins with the rates of all answers and learns in what prompts differ.
"""

from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (its usual name)

from scheduler_svc.ranker.duration import NUM_STRETCHES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WIDTH = 64
_NUM_LAYERS = 2
_NUM_HEADS = 4
_TOKEN_ROWS = (2039, 2029)
"""A token is the sum of a row of each of two tables (primes): no vocabulary has to be known, tokens that share one row
do not share the other, and a step moves few numbers."""
_HEAD_WIDTH = 128
_DROPOUT = 0.1
_HIDDEN_TOKENS = 0.03
"""In training, so many of the tokens are shown as an unknown one: what is new later must not confuse."""
_COUNT_SCALE = 32.0
_ROTATION_BASE = 10_000.0


class Network(Protocol):
    """What the learner trains."""

    head: "RateHead"

    def __call__(self, token_ids: Tensor, num_tokens: Tensor) -> Tensor:
        """
        Args:
            token_ids: (n, longest), padded on the right with anything.
            num_tokens: (n,) of each prompt, 1 or more.

        Returns:
            (n, NUM_STRETCHES) logarithms of the rates.
        """


class RateHead(nn.Module):
    """States of a prompt's tokens to logarithms of rates: from the last state, the mean and the sum of all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(3 * width + 1, _HEAD_WIDTH)
        self.outer = nn.Linear(_HEAD_WIDTH, NUM_STRETCHES)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def begin_with(self, rates: Tensor) -> None:
        """Makes it say these rates of every prompt, until it has learned more."""
        with torch.no_grad():
            self.outer.bias.copy_(rates.log())

    def forward(self, states: Tensor, num_tokens: Tensor) -> Tensor:
        """
        Args:
            states: (n, longest, width).
        """
        inside = torch.arange(states.shape[1]) < num_tokens[:, None]
        total = (states * inside[..., None]).sum(dim=1)
        last = states[torch.arange(len(states)), num_tokens - 1]
        count = num_tokens[:, None].to(states.dtype)
        features = torch.cat([last, total / count, total / _COUNT_SCALE, count.log()], dim=1)
        hidden = F.dropout(F.gelu(self.inner(features)), _DROPOUT, self.training)
        return cast(Tensor, self.outer(hidden))


class SmallNetwork(nn.Module):
    """From scratch, over the policy's own token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.ModuleList(nn.Embedding(1 + rows, _WIDTH) for rows in _TOKEN_ROWS)
        for weight in self.tokens.parameters():
            nn.init.normal_(weight, std=0.02)
        self.layers = nn.ModuleList(_Layer() for _ in range(_NUM_LAYERS))
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = RateHead(_WIDTH)

    def forward(self, token_ids: Tensor, num_tokens: Tensor) -> Tensor:
        shown = torch.rand(token_ids.shape) >= _HIDDEN_TOKENS if self.training else torch.ones_like(token_ids)
        states = sum(
            table((1 + token_ids % rows) * shown) for table, rows in zip(self.tokens, _TOKEN_ROWS, strict=True)
        )
        rotation = _rotation(token_ids.shape[1])
        for layer in self.layers:
            states = layer(states, rotation)
        return cast(Tensor, self.head(self.norm(states), num_tokens))


class _Layer(nn.Module):
    """Causal attention and a feed-forward part, each normalised before. What is right of a prompt's end is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(_WIDTH)
        self.projection = nn.Linear(_WIDTH, 3 * _WIDTH, bias=False)
        self.mixed = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.feed_norm = nn.LayerNorm(_WIDTH)
        self.feed = nn.Sequential(nn.Linear(_WIDTH, 2 * _WIDTH), nn.GELU(), nn.Linear(2 * _WIDTH, _WIDTH))

    def forward(self, states: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        n, longest, _ = states.shape
        parts = self.projection(self.attention_norm(states)).view(n, longest, 3, _NUM_HEADS, _WIDTH // _NUM_HEADS)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(
            _rotated(queries, rotation), _rotated(keys, rotation), values, is_causal=True
        )
        mixed = self.mixed(attended.transpose(1, 2).reshape(n, longest, _WIDTH))
        states = states + F.dropout(mixed, _DROPOUT, self.training)
        return states + F.dropout(self.feed(self.feed_norm(states)), _DROPOUT, self.training)


def _rotation(longest: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles (rotary position embedding), (longest, half a head) each."""
    half = _WIDTH // _NUM_HEADS // 2
    angles = torch.arange(longest)[:, None] * _ROTATION_BASE ** (-torch.arange(half) / half)
    return angles.cos(), angles.sin()


def _rotated(vectors: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = rotation
    left, right = vectors.chunk(2, dim=-1)
    return torch.cat([left * cosine - right * sine, right * cosine + left * sine], dim=-1)


class BaseModelNetwork(nn.Module):
    """A causal language model from a folder or a hub, with the head of lengths in place of its own."""

    def __init__(self, path: str) -> None:
        """
        Raises:
            OSError: there is no such model.
        """
        from transformers import AutoModel

        super().__init__()
        self.base: PreTrainedModel = AutoModel.from_pretrained(path, dtype=torch.float32)
        self.vocabulary = int(self.base.get_input_embeddings().weight.shape[0])
        self.head = RateHead(int(self.base.config.hidden_size))

    def forward(self, token_ids: Tensor, num_tokens: Tensor) -> Tensor:
        if int(token_ids.max()) >= self.vocabulary:
            raise ValueError(
                f"a prompt has token {int(token_ids.max())}, and the ranker's base model knows {self.vocabulary}: it "
                "must have the policy's tokens"
            )
        inside = torch.arange(token_ids.shape[1]) < num_tokens[:, None]
        output = self.base(input_ids=token_ids, attention_mask=inside.long(), use_cache=False)
        return cast(Tensor, self.head(output.last_hidden_state, num_tokens))
