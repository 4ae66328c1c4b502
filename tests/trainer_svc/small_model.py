"""A causal language model of 20 thousand parameters, for tests that compare with plain PyTorch."""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM


def small_model(seed: int = 0, *, tied: bool = False, num_key_value_heads: int = 2) -> Qwen2ForCausalLM:
    """With weights that follow from the seed, larger than usual, so that its distributions are not flat."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=40,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=num_key_value_heads,
            intermediate_size=48,
            tie_word_embeddings=tied,
            initializer_range=0.2,
        )
    )
