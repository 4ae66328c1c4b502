"""What the scheduler and the ranker's process say to each other, and what both must know. No torch.

JSON lines on a socket. To the process:

    {"score": [[prompt_id, [token_id, ...]], ...]}
    {"learn": [[prompt_id, batch, [token_id, ...], [length, ...], [cut, ...]], ...]}

From it:

    {"forecasts": [[prompt_id, [length at each of forecast.LEVELS, ...]], ...]}
    {"restored": [[prompt_id, batch, [token_id, ...], [length, ...], [cut, ...]], ...]}   learned in an earlier life
    {"learned": examples, "steps": steps}                                         it can forecast, or better than before
"""

import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any

from scheduler_svc.ranker.examples import Example

FILE = "ranker.safetensors"
"""In the ranker's folder: what it keeps."""

LEAST_EXAMPLES = 64
"""Answers to fewer prompts say nothing of other prompts."""

ITEMS_A_LINE = 32
"""To write or read a line takes a millisecond at most."""


def lines(kind: str, items: Iterable[Any]) -> Iterator[bytes]:
    """Messages of one kind, some items each."""
    iterator = iter(items)
    while part := list(itertools.islice(iterator, ITEMS_A_LINE)):
        yield line({kind: part})


def line(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def example_to_json(example: Example) -> list[Any]:
    cut = [int(one) for one in example.cut]
    return [example.prompt_id, example.batch, example.token_ids, example.lengths, cut]


def example_of_json(values: list[Any]) -> Example:
    prompt_id, batch, token_ids, lengths, cut = values
    return Example(prompt_id, batch, tuple(token_ids), tuple(lengths), tuple(map(bool, cut)))
