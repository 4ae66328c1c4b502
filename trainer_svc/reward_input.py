"""What every way of scoring has in common: what is known of an answer, and that it may have no reward."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from streamrl.errors import StreamRLError

LARGEST_REWARD = 1e30
"""Larger ones are mistakes, and their squares no floats any more."""
ARGUMENTS = ("prompt", "response", "answer", "finished", "metadata")


class RewardError(StreamRLError):
    """A reward function failed on one sample: the sample has no reward, which is not a reward of 0."""


@dataclass(frozen=True)
class RewardInput:
    """What a reward function may know of one answer."""

    prompt: str
    """The prompt's text as the data has it, before any template."""
    response: str
    """The answer's text, without its end token."""
    answer: str
    """The key."""
    finished: bool
    """The model ended the answer itself; false when it was cut by `max_tokens`."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The record's other fields."""

    def to_json(self, names: tuple[str, ...] = ARGUMENTS) -> dict[str, Any]:
        """The arguments of these names, of what JSON can say."""
        return {name: _plain(getattr(self, name)) for name in names}


def _plain(value: Any) -> Any:
    """A value as JSON has it: tuples and sets become lists, keys text, and what JSON has no word for its text."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(one) for one in value]
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:
        return _plain(item())  # a number of NumPy's
    to_list = getattr(value, "tolist", None)
    return _plain(to_list()) if callable(to_list) else str(value)
