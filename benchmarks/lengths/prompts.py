"""The prompts: a mix of ten tasks of reasoning-gym, made anew from their seeds whenever they are needed.

The i-th prompt is of task i modulo ten, so that every beginning of the list is the same mix. Each stands behind solved
questions of its task, which show the form of an answer: an answer ends with its line.
"""

import itertools
from collections.abc import Iterator
from typing import Any

# Tasks that a small model answers in the form asked for: where it begins to repeat itself instead, chance decides how
# long the answer is. What decides it otherwise varies within each task, beyond what its defaults allow.
TASKS: dict[str, dict[str, Any]] = {
    "spell_backward": {},
    "number_filtering": {"min_numbers": 2, "max_numbers": 12, "max_decimals": 0},
    "rotate_matrix": {"min_n": 2, "max_n": 10, "max_rotations": 3},
    "gcd": {},
    "number_format": {},
    "complex_arithmetic": {},
    "products": {"max_digits": 8},
    "time_intervals": {},
    "chain_sum": {},
    "bitwise_arithmetic": {"difficulty": 3},
}
_NUM_EXAMPLES = 3
_SEED = 1
_EXAMPLE_SEED = 10_000_000
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
        solved = create_dataset(name, size=_NUM_EXAMPLES, seed=_EXAMPLE_SEED, **options)
        examples.append("\n\n".join(_solved(entry) for entry in solved))
    for index in itertools.count():
        entry = questions[index % len(questions)][index // len(questions)]
        yield f"{examples[index % len(examples)]}\n\nQuestion: {entry['question'].strip()}\nAnswer:"


def _solved(entry: dict[str, Any]) -> str:
    return f"Question: {entry['question'].strip()}\nAnswer: {entry['answer']}"
