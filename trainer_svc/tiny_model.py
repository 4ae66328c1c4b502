"""The model `tiny`: a Qwen2 of 363,136 parameters, made and warm-started on the spot for the counting task.

The warm start imitates a clerk who counts rightly but usually stops at a round number (40, 80, 120). So the model knows
how to count and has a bad habit, which reinforcement then removes: greedy accuracy on held-out prompts is about .46
after the warm start and .96 after thirty iterations of GRPO. It teaches no new skill, and is not meant to.

The result is an ordinary folder in Hugging Face's layout, cached by recipe and seed (see model_cache.py).
"""

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainer_svc.counting_task import MAX_NUMBER, CountingPrompt, draw_prompt, held_out_prompts
from trainer_svc.model_cache import made_once

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from transformers import Qwen2Config, Qwen2ForCausalLM

logger = logging.getLogger(__name__)

# Raise it with every change to what comes out: the cache is keyed by it.
RECIPE_VERSION = 3

# Of the random numbers that demonstrations are drawn with: apart from those of other uses of the seed.
_DEMONSTRATION_STREAM = 1

PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
VOCABULARY = ["<pad>", "<bos>", "<eos>", *(str(number) for number in range(MAX_NUMBER + 1)), "to", "from"]

NUM_STEPS = 240
DEMONSTRATIONS_PER_STEP = 96
_LEARNING_RATE = 3e-3
_WARM_UP_STEPS = 20
_FINAL_RATE_SHARE = 0.1
_MEDIAN_DISTANCE = 7.0
_DISTANCE_SIGMA = 1.1
_ROUND_NUMBER = 40
_STOP_EARLY_PROBABILITY = 0.65
# Demonstrations are trained in rows of similar length, at most so many positions at once, padding included.
_POSITIONS_PER_PASS = 1024
_LOG_EVERY_S = 3.0


def tiny_model_folder(cache_folder: Path, seed: int, report: Callable[[str], None] = logger.info) -> Path:
    """The folder of the tiny model of this seed; makes it first when the cache has none (20 s on a free core).

    Args:
        report: told in sentences how far that is.
    """
    folder = tiny_model_place(cache_folder, seed)
    return made_once(folder, lambda unfinished: save_tiny_model(warm_start(seed, report), unfinished))


def tiny_model_place(cache_folder: Path, seed: int) -> Path:
    """Where the tiny model of this seed is, once it is made."""
    return cache_folder / "models" / f"tiny-v{RECIPE_VERSION}-seed{seed}"


def tiny_config() -> "Qwen2Config":
    """The architecture. Heads are 32 wide: the narrowest that vLLM's attention on CPUs takes."""
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=256,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e8},
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )


def tiny_tokenizer() -> "Tokenizer":
    """One token a word; a bos token is put before every text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(VOCABULARY[:3])
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS_ID)])
    return tokenizer


def demonstration(generator: np.random.Generator, held_out: frozenset[CountingPrompt]) -> tuple[list[int], int]:
    """One answer of the clerk who likes round numbers.

    Returns:
        Token ids of bos, prompt, answer and eos; and how many of them come before the answer.
    """
    while (prompt := draw_prompt(generator, _MEDIAN_DISTANCE, _DISTANCE_SIGMA)) in held_out:
        pass
    stop = prompt.stop
    for number in range(prompt.start + 1, prompt.stop):
        if number % _ROUND_NUMBER == 0 and generator.random() < _STOP_EARLY_PROBABILITY:
            stop = number
            break
    words = ["<bos>", *prompt.text.split(), *(str(number) for number in range(prompt.start + 1, stop + 1)), "<eos>"]
    return [_TOKEN_IDS[word] for word in words], 5


_TOKEN_IDS = {word: index for index, word in enumerate(VOCABULARY)}


def warm_start(seed: int, report: Callable[[str], None] = logger.info) -> "Qwen2ForCausalLM":
    """Makes the model and trains it on demonstrations, reporting progress in sentences.

    Leaves torch's random state alone and works on one thread: a second one hardly helps a model of this size, and the
    two would wait for each other at every step while engines are starting on the same cores.
    """
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _imitate_the_clerk(seed, report)
    finally:
        torch.set_num_threads(num_threads)


def _imitate_the_clerk(seed: int, report: Callable[[str], None]) -> "Qwen2ForCausalLM":
    import torch
    from transformers import Qwen2ForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(tiny_config()).float().train()
    generator = np.random.default_rng([seed, _DEMONSTRATION_STREAM])
    held_out = frozenset(held_out_prompts())
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _learning_rate_share)

    logger.info("making the tiny model: %d steps of %d demonstrations", NUM_STEPS, DEMONSTRATIONS_PER_STEP)
    started = logged = time.monotonic()
    for step in range(1, NUM_STEPS + 1):
        demonstrations = [demonstration(generator, held_out) for _ in range(DEMONSTRATIONS_PER_STEP)]
        loss = _accumulate_gradients(model, demonstrations)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if time.monotonic() - logged >= _LOG_EVERY_S or step == NUM_STEPS:
            logged = time.monotonic()
            report(
                f"warm start of the tiny model: step {step} of {NUM_STEPS}, loss {loss:.3f}, {logged - started:.0f} s"
            )
    return model.eval()


def save_tiny_model(model: "Qwen2ForCausalLM", folder: Path) -> None:
    """Writes model, tokenizer and generation settings into a folder that exists.

    Load the tokenizer with `PreTrainedTokenizerFast`, as models.py does: `AutoTokenizer` of transformers 5 gives every
    Qwen2 the word pieces of the Qwen2 family, whatever its folder says.
    """
    from transformers import GenerationConfig, PreTrainedTokenizerFast

    model.generation_config = GenerationConfig(bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer(),
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        model_max_length=model.config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(folder)


def _learning_rate_share(step: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < _WARM_UP_STEPS:
        return (step + 1) / _WARM_UP_STEPS
    progress = (step - _WARM_UP_STEPS) / (NUM_STEPS - _WARM_UP_STEPS)
    return float(_FINAL_RATE_SHARE + (1 - _FINAL_RATE_SHARE) * 0.5 * (1 + np.cos(np.pi * progress)))


def _accumulate_gradients(model: "Qwen2ForCausalLM", demonstrations: list[tuple[list[int], int]]) -> float:
    """Cross-entropy of answers and end tokens, averaged over all their tokens; returns it."""
    import torch

    num_targets = sum(len(token_ids) - prompt_length for token_ids, prompt_length in demonstrations)
    total = 0.0
    for rows in _rows_of_similar_length(demonstrations):
        tokens, targets = _padded(rows)
        logits = model(input_ids=tokens, use_cache=False).logits  # [rows, positions, vocabulary]
        summed = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=-100, reduction="sum"
        )
        torch.autograd.backward(summed / num_targets)
        total += summed.item()
    return total / num_targets


def _rows_of_similar_length(demonstrations: list[tuple[list[int], int]]) -> Iterator[list[tuple[list[int], int]]]:
    """Cuts a step's demonstrations where a pass would grow too large: few positions are spent on padding."""
    rows: list[tuple[list[int], int]] = []
    for one in sorted(demonstrations, key=lambda row: len(row[0])):
        if rows and len(one[0]) * (len(rows) + 1) > _POSITIONS_PER_PASS:
            yield rows
            rows = []
        rows.append(one)
    yield rows


def _padded(rows: list[tuple[list[int], int]]) -> "tuple[torch.Tensor, torch.Tensor]":
    """Token ids and targets, both [rows, longest]; -100 marks what is not learned. Padding is on the right, so the
    causal mask alone keeps it out of sight."""
    import torch

    longest = max(len(token_ids) for token_ids, _ in rows)
    tokens = torch.full((len(rows), longest), PAD_ID, dtype=torch.long)
    targets = torch.full((len(rows), longest), -100, dtype=torch.long)
    for row, (token_ids, prompt_length) in enumerate(rows):
        tokens[row, : len(token_ids)] = torch.tensor(token_ids)
        targets[row, prompt_length : len(token_ids)] = torch.tensor(token_ids[prompt_length:])
    return tokens, targets
