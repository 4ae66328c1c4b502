"""Trains the ranker's network on answers, a few steps at a time, and forecasts with what it has learned.

The loss is the likelihood of the answers under the rates that the network says, cut answers included as such (see
duration.py). Forecasts are made with a running mean of the weights over the last steps: online, a learning rate never
falls, and the mean takes its noise away.
"""

import copy
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from scheduler_svc.ranker.duration import NUM_STRETCHES, endings_and_exposure, length_quantiles, usual_rates
from scheduler_svc.ranker.examples import Example, draw
from scheduler_svc.ranker.network import BaseModelNetwork, SmallNetwork
from streamrl.planning.forecast import Array

BATCH_PROMPTS = 64

_LEARNING_RATE = 2e-3
_BASE_LEARNING_RATE = 3e-5
"""Of a base model, which has learned much already."""
_WEIGHT_DECAY = 0.05
_WARM_UP_STEPS = 20
_MOST_GRADIENT = 1.0
_MEAN_STEPS = 200
"""The running mean goes over about so many steps; at first over a tenth of those that there were."""
_LARGEST_LOG_RATE = 8.0
_POSITIONS_AT_ONCE = 2048
"""So many tokens go through the network together, padding included: what that needs stays in a core's cache."""


class LengthLearner:
    """One network, its optimizer and the running mean of its weights. For one thread."""

    def __init__(self, base_model: str, seed: int) -> None:
        """
        Args:
            base_model: folder or hub name of a causal language model; empty: the small network.

        Raises:
            OSError: there is no such model.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.network = BaseModelNetwork(base_model) if base_model else SmallNetwork()
        self.mean = copy.deepcopy(self.network).eval()
        """What forecasts: the running mean."""
        self.num_steps = 0
        self._generator = np.random.default_rng(seed)
        self._optimizer = torch.optim.AdamW(_parameter_groups(self.network), betas=(0.9, 0.98))
        self._rates = [group["lr"] for group in self._optimizer.param_groups]

    def learn(self, examples: Sequence[Example], num_steps: int) -> float:
        """Makes steps on examples, the newest of which come last.

        Returns:
            The mean loss: negative log-likelihood of an answer, in nats and but for a constant.

        Raises:
            ValueError: the base model does not know a token.
        """
        if self.num_steps == 0:
            self._begin_with(examples)
        self.network.train()
        total = 0.0
        for _ in range(num_steps):
            chosen = [examples[index] for index in draw(len(examples), BATCH_PROMPTS, self._generator)]
            total += self._step(chosen)
        return total / max(num_steps, 1)

    def forecast(self, prompts: Sequence[Sequence[int]]) -> Array:
        """The distribution of the length of an answer to each prompt.

        Args:
            prompts: token ids, one or more each.

        Returns:
            (n, number of levels) lengths at `forecast.LEVELS`.

        Raises:
            ValueError: as `learn`.
        """
        found = np.empty((len(prompts), NUM_STRETCHES))
        with torch.inference_mode():
            for indices in _of_similar_length(prompts):
                tokens, num_tokens = _padded([prompts[index] for index in indices])
                log_rates = self.mean(tokens, num_tokens).clamp(-_LARGEST_LOG_RATE, _LARGEST_LOG_RATE)
                found[indices] = log_rates.double().exp().numpy()
        return length_quantiles(found)

    def _begin_with(self, examples: Sequence[Example]) -> None:
        endings, exposure = endings_and_exposure([(example.lengths, example.cut) for example in examples])
        rates = torch.from_numpy(usual_rates(endings.sum(axis=0), exposure.sum(axis=0))).float()
        for network in (self.network, self.mean):
            network.head.begin_with(rates)

    def _step(self, examples: Sequence[Example]) -> float:
        said = endings_and_exposure([(example.lengths, example.cut) for example in examples])
        endings, exposure = (torch.from_numpy(part).float() for part in said)
        prompts = [example.token_ids for example in examples]
        # By prompt, not by answer: a prompt that was drawn oftener is no more worth knowing.
        shares = torch.tensor([1.0 / (len(example.lengths) * len(examples)) for example in examples])
        self._optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for indices in _of_similar_length(prompts):
            log_rates = self.network(*_padded([prompts[index] for index in indices]))
            log_rates = log_rates.clamp(-_LARGEST_LOG_RATE, _LARGEST_LOG_RATE)
            unlikely = (log_rates.exp() * exposure[indices] - log_rates * endings[indices]).sum(dim=1)
            loss = (unlikely * shares[indices]).sum()
            loss.backward()
            total += float(loss.detach())
        self.num_steps += 1
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * min(1.0, self.num_steps / _WARM_UP_STEPS)
        nn.utils.clip_grad_norm_(self.network.parameters(), _MOST_GRADIENT)
        self._optimizer.step()
        self._move_mean()
        return total

    def _move_mean(self) -> None:
        share = 1 / min(_MEAN_STEPS, 1 + self.num_steps // 10)
        with torch.no_grad():
            torch._foreach_lerp_(list(self.mean.parameters()), list(self.network.parameters()), share)


def _parameter_groups(network: nn.Module) -> list[dict[str, object]]:
    """Only matrices of the network's own layers decay; embeddings of rare tokens would be forgotten."""
    decaying, others, base = [], [], []
    for name, parameter in network.named_parameters():
        if name.startswith("base."):
            base.append(parameter)
        elif parameter.ndim == 2 and not name.startswith("tokens."):
            decaying.append(parameter)
        else:
            others.append(parameter)
    return [
        {"params": decaying, "lr": _LEARNING_RATE, "weight_decay": _WEIGHT_DECAY},
        {"params": others, "lr": _LEARNING_RATE, "weight_decay": 0.0},
        *([{"params": base, "lr": _BASE_LEARNING_RATE, "weight_decay": 0.0}] if base else []),
    ]


def _padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Token ids (n, longest), padded on the right, and the number of tokens of each prompt (n,)."""
    rows = [torch.tensor(prompt, dtype=torch.long) for prompt in prompts]
    return pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in rows])


def _of_similar_length(prompts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Indices of prompts that go through the network together: few positions are spent on padding."""
    indices: list[int] = []
    for index in sorted(range(len(prompts)), key=lambda index: len(prompts[index])):
        if indices and len(prompts[index]) * (len(indices) + 1) > _POSITIONS_AT_ONCE:
            yield indices
            indices = []
        indices.append(index)
    if indices:
        yield indices
