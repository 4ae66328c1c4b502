"""Answers that the ranker learns from: the newest of each prompt, the newest prompts. Pure state."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MOST_PROMPT_TOKENS = 128
"""Of a longer prompt the ranker sees the beginning and, mostly, the end, where the question stands."""
_BEGINNING = 32

_MOST_EXAMPLES = 20_000
_NEWEST = 512
_NEWEST_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt's answers of one batch."""

    prompt_id: str
    batch: int
    token_ids: tuple[int, ...]
    """As `seen_of` cuts them."""
    lengths: tuple[int, ...]
    cut: tuple[bool, ...]
    """Which answers would have gone on."""


def seen_of(token_ids: Sequence[int]) -> tuple[int, ...]:
    """What the ranker sees of a prompt."""
    if len(token_ids) <= MOST_PROMPT_TOKENS:
        return tuple(token_ids)
    return (*token_ids[:_BEGINNING], *token_ids[_BEGINNING - MOST_PROMPT_TOKENS :])


class Examples:
    """What is learned from; the order is that in which it came."""

    def __init__(self, most: int = _MOST_EXAMPLES) -> None:
        self._most = most
        self._by_prompt: dict[str, Example] = {}

    def __len__(self) -> int:
        return len(self._by_prompt)

    def all(self) -> list[Example]:
        return list(self._by_prompt.values())

    def add(self, example: Example) -> None:
        """Takes the place of an earlier one of the same prompt; of too many the oldest goes."""
        self._by_prompt.pop(example.prompt_id, None)
        self._by_prompt[example.prompt_id] = example
        if len(self._by_prompt) > self._most:
            del self._by_prompt[next(iter(self._by_prompt))]


def draw(num_examples: int, count: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """Which examples a step takes: half of them of the newest, since the policy changes, the rest of all.

    Returns:
        `count` indices, of fewer examples all of them; each once at most.
    """
    if num_examples <= count:
        return generator.permutation(num_examples)
    newest = min(_NEWEST, num_examples)
    of_newest = generator.choice(newest, min(round(count * _NEWEST_SHARE), newest), replace=False)
    chosen = num_examples - 1 - of_newest
    others = np.setdiff1d(np.arange(num_examples), chosen)
    return np.concatenate([chosen, generator.choice(others, count - len(chosen), replace=False)])
