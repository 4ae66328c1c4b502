"""The rewards that have names. Each is an example of what a user's own may look like; rewards.py calls them.

All take the same arguments by name: `prompt`, the text as the data has it, before any template; `response`, the text of
the answer without its end token; `answer`, the key; `finished`, whether the model ended the answer itself; `metadata`,
the record's other fields.

Except for graded's part marks, an answer that was cut by `max_tokens` earns nothing: what was cut off may have changed
it (12 of 123).
"""

import functools
import json
import re
from collections.abc import Callable, Mapping
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


def reasoning_gym(*, prompt: str, response: str, answer: str, finished: bool, metadata: Mapping[str, Any]) -> float:
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
    check = _task_checker(metadata["task"], json.dumps(metadata["task_options"], sort_keys=True))
    return float(check(given, {"question": prompt, "answer": answer, "metadata": metadata}))


@functools.lru_cache(maxsize=16)
def _task_checker(task: str, options_json: str) -> Callable[[str, dict[str, Any]], float]:
    """The checker of a task with its options: some tasks check by their difficulty settings."""
    import reasoning_gym as gym

    checker: Callable[[str, dict[str, Any]], float] = gym.create_dataset(
        task, size=1, seed=0, **json.loads(options_json)
    ).score_answer
    return checker


def find_last_number(text: str) -> Decimal | None:
    """The last decimal number in the text; thousands may be separated by commas."""
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "").replace("−", "-")) if numbers else None
