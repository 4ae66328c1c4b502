"""Lengths of answers that are known before: the oracle's file."""

import math
from pathlib import Path
from typing import Any

from streamrl.json_object import read_object


def read_known_lengths(file: Path) -> dict[str, list[float]]:
    """Tokens of the answers to prompts, by prompt id.

    Raises:
        ValueError: there is no such file, or it does not hold that.
    """
    try:
        values = read_object(file)
    except FileNotFoundError:
        raise ValueError(f"scheduler.length_file: there is no file {file}") from None
    except ValueError as error:
        raise ValueError(f"scheduler.length_file: {file}: {error}") from error
    return {prompt_id: _lengths(file, prompt_id, value) for prompt_id, value in values.items()}


def _lengths(file: Path, prompt_id: str, value: Any) -> list[float]:
    listed = value if isinstance(value, list) else [value]
    if not listed or not all(map(_is_length, listed)):
        raise ValueError(
            f"scheduler.length_file: {file}: expected a length above 0, or a list of such, for {prompt_id!r}, "
            f"got {value!r}"
        )
    return [float(length) for length in listed]


def _is_length(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
