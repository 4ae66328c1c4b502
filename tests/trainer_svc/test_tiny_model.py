"""Tests of trainer_svc.tiny_model."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2ForCausalLM

from trainer_svc import tiny_model
from trainer_svc.counting_task import MAX_ANSWER_TOKENS, held_out_prompts
from trainer_svc.tiny_model import (
    BOS_ID,
    EOS_ID,
    VOCABULARY,
    demonstration,
    tiny_config,
    tiny_model_folder,
    tiny_tokenizer,
    warm_start,
)


def test_the_tokenizer_makes_one_token_a_word_and_puts_bos_first() -> None:
    tokenizer = tiny_tokenizer()
    encoded = tokenizer.encode("to 68 from 47")
    assert encoded.tokens == ["<bos>", "to", "68", "from", "47"]
    assert encoded.ids[0] == BOS_ID
    assert tokenizer.decode([*tokenizer.encode("48 49", add_special_tokens=False).ids, EOS_ID]) == "48 49"
    assert tokenizer.get_vocab_size() == len(VOCABULARY) == 133


def test_demonstrations_count_rightly_and_stop_early_only_at_round_numbers() -> None:
    generator, held_out = np.random.default_rng(0), frozenset(held_out_prompts())
    texts = {prompt.text for prompt in held_out}
    stopped_early = crossed = 0
    for _ in range(2000):
        token_ids, prompt_length = demonstration(generator, held_out)
        words = [VOCABULARY[token_id] for token_id in token_ids]
        assert (words[0], words[-1]) == ("<bos>", "<eos>")
        assert " ".join(words[1:prompt_length]) not in texts
        stop, start = int(words[2]), int(words[4])
        counted = [int(word) for word in words[prompt_length:-1]]
        assert counted == list(range(start + 1, counted[-1] + 1))
        assert counted[-1] == stop or (counted[-1] < stop and counted[-1] % 40 == 0)
        stopped_early += counted[-1] < stop
        crossed += any(number % 40 == 0 for number in range(start + 1, stop))
    assert 0.55 < stopped_early / crossed < 0.8


def test_how_a_step_is_cut_into_passes_does_not_change_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    demonstrations = [demonstration(generator, frozenset()) for _ in range(24)]
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(tiny_config()).float()
    gradients = []
    for positions in (64, 100_000):
        monkeypatch.setattr(tiny_model, "_POSITIONS_PER_PASS", positions)
        model.zero_grad()
        tiny_model._accumulate_gradients(model, demonstrations)
        gradients.append(torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)


def test_a_warm_start_is_decided_by_its_seed_and_leaves_the_random_state_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_model, "NUM_STEPS", 2)
    state, num_threads = torch.get_rng_state(), torch.get_num_threads()
    first, again, other = (warm_start(seed).lm_head.weight for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == num_threads


def test_the_folder_is_an_ordinary_one_and_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_model, "NUM_STEPS", 2)
    folder = tiny_model_folder(tmp_path, seed=0)
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in folder.iterdir()
    }
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    assert sum(weight.numel() for weight in model.parameters()) == 363_136
    assert tokenizer("to 68 from 47")["input_ids"] == tiny_tokenizer().encode("to 68 from 47").ids
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == EOS_ID
    assert tokenizer.decode([*tokenizer("48 49", add_special_tokens=False)["input_ids"], EOS_ID]) == "48 49 <eos>"
    assert tokenizer.decode(tokenizer("48 49")["input_ids"], skip_special_tokens=True) == "48 49"

    monkeypatch.setattr(tiny_model, "warm_start", None)
    assert tiny_model_folder(tmp_path, seed=0) == folder


@pytest.mark.slow
def test_the_model_starts_with_a_habit_that_leaves_room_to_learn() -> None:
    model = warm_start(seed=0)
    prompts = held_out_prompts()
    tokenizer = tiny_tokenizer()
    token_ids = torch.tensor([tokenizer.encode(prompt.text).ids for prompt in prompts])
    answers = model.generate(
        input_ids=token_ids,
        attention_mask=torch.ones_like(token_ids),
        do_sample=False,
        max_new_tokens=MAX_ANSWER_TOKENS + 8,
        eos_token_id=EOS_ID,
        pad_token_id=tiny_model.PAD_ID,
    )[:, token_ids.shape[1] :]
    right = [
        tokenizer.decode(answer) == prompt.answer for answer, prompt in zip(answers.tolist(), prompts, strict=True)
    ]
    assert 0.35 < sum(right) / len(right) <= 0.6
