"""A training step as one writes it with PyTorch and transformers alone, carefully: rows of one prompt and one answer,
sorted by length, padded within a budget of tokens, logits of the answers alone, float32 master weights.

What it leaves out: several ranks, sharding, statistics, reference and critic, prompts that answers share.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from trainer_svc.microbatches import TrainSample

_CLIP = 0.2


class PlainLoop:
    """A model and its AdamW."""

    def __init__(
        self, model: nn.Module, *, learning_rate: float, betas: tuple[float, float], max_grad_norm: float, tokens: int
    ) -> None:
        """
        Args:
            model: of transformers, in float32 or bfloat16.
            tokens: most of one pass, padding included.
        """
        self._model = model
        self._max_grad_norm = max_grad_norm
        self._tokens = tokens
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        has_masters = any(parameter.dtype != torch.float32 for parameter in self._trained)
        self._masters = (
            [nn.Parameter(parameter.detach().float()) for parameter in self._trained] if has_masters else self._trained
        )
        self._optimizer = torch.optim.AdamW(self._masters, lr=learning_rate, betas=betas, weight_decay=0.0, fused=True)

    def step(self, samples: Sequence[TrainSample]) -> float:
        """One optimizer step of GRPO with the mean over tokens; returns the gradient's norm before clipping."""
        num_tokens = sum(len(sample.answer_token_ids) for sample in samples)
        for rows in self._passes(samples):
            logprobs, behaviour, advantages, written = self._logprobs(rows)
            ratio = (logprobs - behaviour).exp()
            surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - _CLIP, 1 + _CLIP) * advantages)
            (-(surrogate * written).sum() / num_tokens).backward()  # type: ignore[no-untyped-call]
        for parameter, master in zip(self._trained, self._masters, strict=True):
            if master is not parameter and parameter.grad is not None:
                master.grad, parameter.grad = parameter.grad.float(), None
        norm = torch.nn.utils.clip_grad_norm_(self._masters, self._max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            for parameter, master in zip(self._trained, self._masters, strict=True):
                if master is not parameter:
                    parameter.copy_(master)
        return float(norm)

    def _passes(self, samples: Sequence[TrainSample]) -> Iterator[list[TrainSample]]:
        rows: list[TrainSample] = []
        for sample in sorted(samples, key=lambda sample: -sample.num_tokens):
            if rows and rows[0].num_tokens * (len(rows) + 1) > self._tokens:
                yield rows
                rows = []
            rows.append(sample)
        yield rows

    def _logprobs(self, rows: Sequence[TrainSample]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Each (rows, width - first answer token)."""
        first = min(len(row.prompt_token_ids) for row in rows)
        token_ids = torch.zeros(len(rows), rows[0].num_tokens, dtype=torch.int64)
        behaviour, written = torch.zeros(token_ids.shape), torch.zeros(token_ids.shape)
        advantages = torch.tensor([[float(row.advantage)] for row in rows])
        for number, row in enumerate(rows):
            answer = slice(len(row.prompt_token_ids), row.num_tokens)
            token_ids[number, : row.num_tokens] = torch.tensor([*row.prompt_token_ids, *row.answer_token_ids])
            behaviour[number, answer] = torch.tensor(row.behaviour_logprobs)
            written[number, answer] = 1.0
        kept = token_ids.shape[1] - first + 1
        logits = self._model(input_ids=token_ids, use_cache=False, logits_to_keep=kept).logits[:, :-1]
        logprobs = torch.log_softmax(logits.float(), dim=-1).gather(-1, token_ids[:, first:, None]).squeeze(-1)
        # Padding has whatever log-prob the model gives it.
        logprobs = torch.where(written[:, first:] > 0, logprobs, behaviour[:, first:])
        return logprobs, behaviour[:, first:], advantages, written[:, first:]
