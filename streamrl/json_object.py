"""Reads small JSON objects, and says of what is none what was expected and what came."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_KINDS: Mapping[type, str] = {list: "a list", str: "a text", bool: "a truth value", type(None): "null"}


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it cannot be read, or holds something else; says what was expected and what came.
    """
    try:
        text = file.read_text()
    except FileNotFoundError:
        raise
    except UnicodeDecodeError as error:
        raise ValueError(f"expected a JSON object in UTF-8, got other bytes at {error.start}") from error
    except OSError as error:
        raise ValueError(f"expected a file that can be read, got: {error.strerror}") from error
    return object_of(text)


def object_of(text: str) -> dict[str, Any]:
    """The JSON object that a text is.

    Raises:
        ValueError: it is something else; says what was expected and what came.
    """
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        came = f"{error.msg} at line {error.lineno}, column {error.colno}" if text.strip() else "nothing"
        raise ValueError(f"expected a JSON object, got {came}") from error
    except RecursionError as error:
        raise ValueError("expected a JSON object, got one that is nested too deep") from error
    except ValueError as error:  # of Python's limit on the digits of a number
        raise ValueError("expected a JSON object, got one with a number of thousands of digits") from error
    if not isinstance(values, dict):
        raise ValueError(f"expected a JSON object, got {_KINDS.get(type(values), 'a number')}")
    return values
