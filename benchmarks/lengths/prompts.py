"""The prompts: a mix of ten tasks of reasoning-gym, made anew from their seeds whenever they are needed.

The i-th prompt is of task i modulo ten, so that every beginning of the list is the same mix. Each stands behind one
solved question of its task, which shows the form of an answer: an answer ends with its line.
"""

import itertools
from collections.abc import Iterator
from typing import Any

# What decides how long an answer is varies within each task, beyond what its defaults allow.
TASKS: dict[str, dict[str, Any]] = {
    "word_sorting": {"min_words": 2, "max_words": 10, "max_word_length": 8},
    "word_sequence_reversal": {"min_words": 2, "max_words": 10},
    "sentence_reordering": {"max_words_in_sentence": 14},
    "number_filtering": {"min_numbers": 3, "max_numbers": 9, "max_decimals": 1},
    "fraction_simplification": {},
    "spell_backward": {},
    "caesar_cipher": {"max_words": 8},
    "prime_factorization": {},
    "chain_sum": {},
    "letter_counting": {},
}
_SEED = 1
_EXAMPLE_SEED = 2
_MOST_PROMPTS = 100_000


def task_of(index: int) -> str:
    """The task of the prompt with this index."""
    return list(TASKS)[index % len(TASKS)]


def prompts() -> Iterator[str]:
    """All prompts in order, without an end in practice."""
    from reasoning_gym.factory import create_dataset

    questions, examples = [], []
    for name, options in TASKS.items():
        questions.append(create_dataset(name, size=_MOST_PROMPTS, seed=_SEED, **options))
        examples.append(_solved(create_dataset(name, size=1, seed=_EXAMPLE_SEED, **options)[0]))
    for index in itertools.count():
        entry = questions[index % len(questions)][index // len(questions)]
        yield f"{examples[index % len(examples)]}\n\nQuestion: {entry['question'].strip()}\nAnswer:"


def _solved(entry: dict[str, Any]) -> str:
    return f"Question: {entry['question'].strip()}\nAnswer: {entry['answer']}"
