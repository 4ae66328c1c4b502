import math

import pytest
import torch

from trainer_svc import token_logprobs as module
from trainer_svc.token_logprobs import token_logprobs


def _reference_logprobs(logits, targets, temperature):
    return torch.log_softmax(logits / temperature, dim=-1).gather(-1, targets[..., None]).squeeze(-1)


@pytest.mark.parametrize("chunk_elements", [1, 30, 1 << 22])
def test_token_logprobs_and_their_gradient_are_those_of_log_softmax(monkeypatch, chunk_elements):
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", chunk_elements)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 11, dtype=torch.float64, generator=generator, requires_grad=True)
    targets = torch.randint(0, 11, (3, 5), generator=generator)
    logprobs, entropies = token_logprobs(logits, targets, temperature=0.7)
    reference = _reference_logprobs(logits, targets, 0.7)
    torch.testing.assert_close(logprobs, reference, rtol=0, atol=1e-12)
    distribution = torch.distributions.Categorical(logits=logits.detach() / 0.7)
    torch.testing.assert_close(entropies, distribution.entropy(), rtol=0, atol=1e-12)
    assert not entropies.requires_grad
    weights = torch.randn(3, 5, dtype=torch.float64, generator=generator)
    (gradient,) = torch.autograd.grad((logprobs * weights).sum(), logits)
    (expected,) = torch.autograd.grad((reference * weights).sum(), logits)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


def test_bfloat16_logits_are_normalised_in_float32():
    logits = (torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)) * 5).bfloat16()
    targets = torch.arange(4)
    logprobs, entropies = token_logprobs(logits, targets, temperature=1.0)
    assert logprobs.dtype == entropies.dtype == torch.float32
    torch.testing.assert_close(logprobs, _reference_logprobs(logits.float(), targets, 1.0), rtol=0, atol=1e-5)


def test_a_token_that_cannot_be_drawn_adds_nothing_to_the_entropy():
    logits = torch.tensor([[0.0, 0.0, -math.inf]])
    _, entropies = token_logprobs(logits, torch.tensor([0]), temperature=1.0)
    assert entropies.item() == pytest.approx(math.log(2))
