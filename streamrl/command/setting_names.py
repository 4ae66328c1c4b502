"""Names of settings: which exist, which is nearest to one that does not, and how text becomes a value."""

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, TypeAlias, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

Sections: TypeAlias = Any
"""What has names: a section (`type[BaseModel]`), or sections by names that users choose (`dict[str, SiteSection]`)."""

_NEAR = 0.6
_VERY_NEAR = 0.8


def section_class(field: FieldInfo) -> Sections | None:
    """The section, or the named sections, that a field holds; None when it holds a value."""
    annotation = field.annotation
    if get_origin(annotation) is UnionType:
        # A section that may be left out.
        annotation = next(part for part in get_args(annotation) if part is not NoneType)
    if get_origin(annotation) is dict:
        return annotation if _is_section(get_args(annotation)[1]) else None
    return annotation if _is_section(annotation) else None


def field_of(sections: Sections, name: str) -> FieldInfo | None:
    """What a name stands for in a section; None: nothing."""
    if isinstance(sections, type) and issubclass(sections, BaseModel):
        return sections.model_fields.get(name)
    return FieldInfo.from_annotation(get_args(sections)[1])


def known_names(sections: Sections, prefix: str = "", like: Sequence[str] = ()) -> list[str]:
    """Dotted names of all settings, in their order.

    Args:
        like: parts of a dotted name, for the names that the user chooses; where it has none, NAME.
    """
    if isinstance(sections, type) and issubclass(sections, BaseModel):
        chosen = list(sections.model_fields)
    else:
        depth = prefix.count(".")
        chosen = [like[depth] if depth < len(like) else "NAME"]
    names = []
    for name in chosen:
        field = field_of(sections, name)
        assert field is not None
        section = section_class(field)
        names.extend(known_names(section, f"{prefix}{name}.", like) if section else [prefix + name])
    return names


def unknown_names(values: Mapping[str, Any], sections: Sections, prefix: str = "") -> Iterator[str]:
    """Dotted names in `values` that `sections` does not have."""
    for name, value in values.items():
        field = field_of(sections, name)
        if field is None:
            yield prefix + name
        elif (section := section_class(field)) is not None and isinstance(value, Mapping):
            yield from unknown_names(value, section, f"{prefix}{name}.")


def _is_section(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def suggestion(unknown: str, model: type[BaseModel]) -> str:
    """Half a sentence on what may have been meant by an unknown dotted name."""
    names = known_names(model, like=unknown.split("."))
    section, _, key = unknown.rpartition(".")
    siblings = [name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == section]
    sections = sorted({name.partition(".")[0] for name in names})
    nearest = (
        [name for name in names if name.rpartition(".")[2] == key]
        or [f"{section}.{near}" for near in difflib.get_close_matches(key, siblings, 1, _NEAR)]
        or (difflib.get_close_matches(unknown, sections, 1, _NEAR) if not section else [])
        or difflib.get_close_matches(unknown, names, 1, _VERY_NEAR)
    )
    if nearest:
        return f"did you mean {nearest[0]}?"
    if siblings:
        return f"{section} has {', '.join(siblings)}"
    return f"sections are {', '.join(sections)}"


def without(values: Mapping[str, Any], unknown: set[str], prefix: str = "") -> dict[str, Any]:
    """The values less those of the unknown dotted names."""
    return {
        name: without(value, unknown, f"{prefix}{name}.") if isinstance(value, Mapping) else value
        for name, value in values.items()
        if prefix + name not in unknown
    }


def parse_value(text: str) -> Any:
    """A TOML value, or else the text itself: `3`, `0.5`, `true`, `[1, 2]`, `"quoted"`, `plain`."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def parse_assignment(assignment: str, model: type[BaseModel]) -> dict[str, Any]:
    """`section.key=value` as a nested mapping.

    Whatever stands behind the name of a free table is one key of it: `kafka.client.sasl.password=secret`.

    Raises:
        ValueError: not of that form.
    """
    name, equals, text = assignment.partition("=")
    parts = _split_name(name.strip())
    if not equals or len(parts) < 2 or not all(parts):
        raise ValueError(f"--set {assignment}: expected SECTION.KEY=VALUE, such as trainer.num_iterations=10")
    known, rest, field = _descend(parts, model)
    value: Any = parse_value(text.strip())
    if field is not None and field.annotation is str and not isinstance(value, str):
        # A text that looks like a number, a date or a list is still a text.
        value = text.strip()
    if field is not None and rest and get_origin(field.annotation) is dict:
        rest = [".".join(rest)]
    for part in reversed(known + rest):
        value = {part: value}
    assert isinstance(value, dict)
    return value


def table_of_key(name: str, model: type[BaseModel]) -> str | None:
    """The free table that a dotted name means one key of: `kafka.client` for `kafka.client.sasl.password`.

    None: the name is that of a section or of a setting as a whole.
    """
    known, rest, field = _descend(_split_name(name), model)
    return ".".join(known) if field is not None and rest else None


def join_free_tables(values: Mapping[str, Any], sections: Sections) -> dict[str, Any]:
    """`{"client": {"sasl": {"password": …}}}` as `{"client": {"sasl.password": …}}`, where a table holds plain values.

    TOML reads an unquoted `sasl.password = …` as nested tables, and so it is mostly written.
    """
    joined: dict[str, Any] = {}
    for name, value in values.items():
        field = field_of(sections, name)
        if field is not None and isinstance(value, Mapping):
            section = section_class(field)
            if section is not None:
                joined[name] = join_free_tables(value, section)
                continue
            if get_origin(field.annotation) is dict and get_args(field.annotation)[1] is not Any:
                joined[name] = dict(_leaves(value))
                continue
        joined[name] = value
    return joined


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _split_name(name: str) -> list[str]:
    """The parts of a dotted TOML key, which may be quoted."""
    try:
        value: Any = tomllib.loads(f"{name} = 0")
    except tomllib.TOMLDecodeError:
        return name.split(".")
    parts = []
    while isinstance(value, dict):
        (part,) = value
        parts.append(part)
        value = value[part]
    return parts


def _descend(parts: list[str], model: type[BaseModel]) -> tuple[list[str], list[str], FieldInfo | None]:
    """The parts that name sections and a field, the parts behind them, and the field (None: unknown)."""
    current: Sections | None = model
    for index, part in enumerate(parts):
        field = field_of(current, part) if current is not None else None
        if field is None:
            return parts[:index], parts[index:], None
        current = section_class(field)
        if current is None:
            return parts[: index + 1], parts[index + 1 :], field
    return parts, [], None
