"""The rewards that have names. Each is an example of what a user's own may look like; who calls them is in rewards.py.

All take the same arguments by name: `prompt`, the text as the data has it, before any template; `response`, the text of
the answer without its end token; `answer`, the key; `finished`, whether the model ended the answer itself; `metadata`,
the record's other fields.

Except for graded's part marks, an answer that was cut by `max_tokens` earns nothing: what was cut off may have changed
it (12 of 123).
"""

import functools
import json
import logging
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

# A minus is a sign only where no number, word or bracket ends before it: 5-3 holds 5 and 3.
_NUMBER = re.compile(r"(?:(?<![\w.)\]])[-−])?(?:(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?|(?<!\d)\.\d+)")
_INTEGER = re.compile(r"[-−+]?\d+")


def exact_match(*, response: str, answer: str, finished: bool) -> float:
    """1 when the answer is the key, blanks around it aside, and the model ended it."""
    return float(finished and response.strip() == answer.strip())


def last_number(*, response: str, answer: str, finished: bool) -> float:
    """1 when the last number of the answer equals the last number of the key (so "… #### 42" will do as a key)."""
    key = find_last_number(answer)
    if key is None:
        raise ValueError(f"last_number: the key {answer!r} holds no number")
    return float(finished and find_last_number(response) == key)


def graded(*, response: str, answer: str, finished: bool) -> float:
    """For a number: 1 when exactly the key and ended by the model, 0.3 when the last number is right, 0.1 when it is
    some bare integer. Part marks give a model that does not know the format yet something to climb."""
    if exact_match(response=response, answer=answer, finished=finished):
        return 1.0
    key = find_last_number(answer)
    if key is None:
        raise ValueError(f"graded: the key {answer!r} holds no number")
    if find_last_number(response) == key:
        return 0.3
    return 0.1 if _INTEGER.fullmatch(response.strip()) else 0.0


def reasoning_gym(*, response: str, finished: bool, metadata: Mapping[str, Any]) -> float:
    """What the task's own checker says, 0 to 1. Text in <answer> tags counts, else the whole answer."""
    if "task" not in metadata or "task_options" not in metadata:
        raise ValueError(
            "reasoning_gym: this prompt does not come from a task of reasoning-gym. "
            'Set data.train and data.eval to "reasoning_gym:TASK", or choose another reward'
        )
    if not finished:
        return 0.0
    tagged = re.findall(r"<answer>(.*?)</answer>", response, flags=re.DOTALL)
    given = (tagged[-1] if tagged else response).strip()
    options = json.dumps(metadata["task_options"], sort_keys=True)
    task = _task(metadata["task"], options, metadata["task_seed"], metadata["task_size"])
    return float(task.score_answer(given, _task_entry(task, metadata["task_index"])))


def math_verify(*, response: str, answer: str, finished: bool) -> float:
    """1 when the answer is mathematically the same as the key and the model ended it."""
    from math_verify import parse, verify

    # It warns that its own limits are off: they are signals, which cannot interrupt one long operation on huge
    # integers (9^9^9^9). The process that runs this has a limit.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    key_text = answer.rsplit("####", 1)[-1].strip()
    key = parse(f"${key_text}$", parsing_timeout=None) or parse(key_text, parsing_timeout=None)
    if not key:
        raise ValueError(f"math_verify: the key {answer!r} is not mathematics")
    return float(finished and verify(key, parse(response, parsing_timeout=None), timeout_seconds=None))


@functools.lru_cache(maxsize=64)
def _task(task: str, options_json: str, seed: int, size: int) -> Any:
    """A task with its options: some tasks check by their difficulty settings."""
    import reasoning_gym as gym

    return gym.create_dataset(task, size=size, seed=seed, **json.loads(options_json))


@functools.lru_cache(maxsize=256)
def _task_entry(task: Any, index: int) -> dict[str, Any]:
    """A question with its key, as the task's checker knows it. Made again: it may hold more than JSON can say."""
    entry: dict[str, Any] = task[index]
    return entry


def find_last_number(text: str) -> Decimal | None:
    """The last decimal number in the text; thousands may be separated by commas."""
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "").replace("−", "-")) if numbers else None
