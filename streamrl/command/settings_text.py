"""Resolved settings for people: as TOML, without secrets."""

import json
import re
from collections.abc import Mapping
from typing import Any

from streamrl.command.settings import Settings

_SECRET = re.compile(r"password|secret|token|key\.pem|private\.key|jaas", re.IGNORECASE)
_HIDDEN = "(hidden)"


def public_settings(settings: Settings) -> dict[str, Any]:
    """The settings as plain values; among librdkafka's own, values that are secrets by their name are hidden."""
    values = settings.model_dump(mode="json")
    clusters = [values["kafka"], *(site["kafka"] for site in values["sites"].values() if site["kafka"] is not None)]
    for kafka in clusters:
        kafka["client"] = {name: _HIDDEN if _SECRET.search(name) else value for name, value in kafka["client"].items()}
    return values


def toml_text(values: Mapping[str, Any]) -> str:
    """Sections of values as a TOML document."""
    sections = []
    for name, section in values.items():
        lines = [f"[{name}]", *(f"{key} = {_value(value)}" for key, value in section.items() if value is not None)]
        sections.append("\n".join(lines))
    return "\n\n".join(sections)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        items = [f"{_key(name)} = {_value(item)}" for name, item in value.items() if item is not None]
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, float):
        return repr(value)
    return _json(value)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _json(name)


def _json(value: Any) -> str:
    """JSON's strings, integers and booleans are TOML's too, but for one character that TOML wants escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
