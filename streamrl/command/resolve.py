"""From a TOML file, the environment and `--set` to the final settings of a run, with every problem in one message.

Later ones win: TOML, then `STREAMRL_SECTION__KEY`, then `--set section.key=value`. A table that is given whole replaces
the earlier one; `section.table.key` changes one key of it. Nothing is started or written here.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Mapping, Sequence, Set
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import EnvSettingsSource, SettingsError, TomlConfigSettingsSource

from streamrl.command.ports import free_port
from streamrl.command.setting_names import (
    Sections,
    field_of,
    join_free_tables,
    parse_assignment,
    parse_value,
    section_class,
    suggestion,
    table_of_key,
    unknown_names,
    without,
)
from streamrl.command.settings import SERVICE_SETTINGS, Settings
from streamrl.settings import RunSection

_ENVIRONMENT = "environment"
_PREFIX = "STREAMRL_"
_BROKER = "kafka.bootstrap_servers"
_NONE: Set[str] = frozenset()


class _EnvironmentSource(EnvSettingsSource):
    """The environment, with lists and tables as TOML values."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        del field_name, field
        return parse_value(value)


def resolve(config: Path, assignments: Sequence[str], *, must_have_id: bool = False) -> Settings:
    """Reads and checks the settings. Addresses with port 0 stay so: see `with_addresses`.

    Args:
        config: a TOML file.
        assignments: `section.key=value`, the later one wins.
        must_have_id: an empty `run.id` is refused, where else a name is made up.

    Raises:
        ValueError: with every problem that was found.
    """
    problems: list[str] = []
    settings = _combined(
        [
            (str(config), _from_file(config), _NONE),
            (_ENVIRONMENT, _from_environment(problems), _tables_by_key(_environment_names())),
            *_layers(assignments),
        ],
        problems,
    )
    if must_have_id and settings is not None and not settings.run.id:
        problems.append("run.id is empty: services that are started one by one need one name for their run")
    if settings is not None and settings.run.attempt != RunSection().attempt:
        problems.append(
            f"run.attempt is {settings.run.attempt}: leave it out, for a run begins with its first attempt, and each "
            "resume raises it by itself"
        )
    if problems or settings is None:
        raise ValueError(_listed(problems))
    run = settings.run.model_copy(
        update={
            "id": settings.run.id or new_run_id(config, settings.run.dir, datetime.now(UTC)),
            "dir": settings.run.dir.resolve(),
        }
    )
    return settings.model_copy(update={"run": run})


def resolve_again(values: Mapping[str, Any], origin: str, assignments: Sequence[str]) -> Settings:
    """The settings of a run that is taken up again, with some of them changed. The environment has no say.

    Args:
        values: whole settings, by section.
        origin: where they stand, for messages.
        assignments: as `resolve`.

    Raises:
        ValueError: with every problem that was found.
    """
    problems: list[str] = []
    settings = _combined([(origin, dict(values), _NONE), *_layers(assignments)], problems)
    if problems or settings is None:
        raise ValueError(_listed(problems))
    return settings


_Layer = tuple[str, dict[str, Any], Set[str]]
"""Where it comes from, its values, and the tables that it changes key by key."""


def _layers(assignments: Sequence[str]) -> list[_Layer]:
    return [
        (
            f"--set {assignment}",
            parse_assignment(assignment, Settings),
            _tables_by_key([assignment.partition("=")[0].strip()]),
        )
        for assignment in assignments
    ]


def _combined(layers: Sequence[_Layer], problems: list[str]) -> Settings | None:
    """The later layers over the earlier ones; adds to the problems. None: they make no settings."""
    values: dict[str, Any] = {}
    for origin, layer, by_key in layers:
        joined = join_free_tables(layer, Settings)
        unknown = set(unknown_names(joined, Settings))
        problems.extend(f"{_place(name, origin)}: unknown; {suggestion(name, Settings)}" for name in sorted(unknown))
        values = _updated(values, without(joined, unknown), Settings, by_key)
    settings, wrong = _validated(values)
    problems.extend(wrong)
    return settings


def with_addresses(settings: Settings) -> Settings:
    """The settings with a free port for each service that others must find and that has port 0.

    Generators, which nobody has to find, keep port 0 and take one when they start.
    """
    addresses: dict[str, str] = {}
    taken: set[int] = set()
    for name in ("trainer_address", "scheduler_address", "weights_address"):
        host, _, port = getattr(settings.rpc, name).rpartition(":")
        if port == "0":
            chosen = free_port(host.strip("[]"), taken)
            taken.add(chosen)
            addresses[name] = f"{host}:{chosen}"
    return settings.model_copy(update={"rpc": settings.rpc.model_copy(update=addresses)})


def chosen_settings(asked: Settings, final: Settings) -> tuple[str, ...]:
    """Names of the addresses in `final` that the command filled in."""
    names = [
        f"rpc.{name}" for name in type(asked.rpc).model_fields if getattr(asked.rpc, name) != getattr(final.rpc, name)
    ]
    if asked.kafka.bootstrap_servers != final.kafka.bootstrap_servers:
        names.append(_BROKER)
    return tuple(names)


def without_chosen(values: dict[str, Any], chosen: Sequence[str]) -> dict[str, Any]:
    """Whole settings, with the addresses of these names left to the command again."""
    values = {section: dict(keys) for section, keys in values.items()}
    for name in chosen:
        section, _, key = name.partition(".")
        if key not in values.get(section, {}):
            continue
        host = str(values[section][key]).rpartition(":")[0]
        values[section][key] = "" if name == _BROKER else f"{host}:0"
    return values


def new_run_id(config: Path, runs: Path, now: datetime) -> str:
    """A name from the settings file's name and the time, that no folder in `runs` has."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", config.stem).strip("-_")[:60] or "run"
    base = f"{stem}-{now:%Y%m%d-%H%M%S}"
    candidate, count = base, 1
    while os.path.lexists(runs / candidate):
        count += 1
        candidate = f"{base}-{count}"
    return candidate


def _from_file(config: Path) -> dict[str, Any]:
    if not config.is_file():
        raise ValueError(f"settings file {config} is missing: expected a TOML file, such as examples/laptop.toml")
    try:
        return TomlConfigSettingsSource(Settings, config)()
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{config} is not a TOML file: {error}") from error


def _from_environment(problems: list[str]) -> dict[str, Any]:
    known = {f"{_PREFIX}{section.upper()}" for section in Settings.model_fields}
    for name in sorted(os.environ):
        if name.upper().startswith(_PREFIX) and name.upper().partition("__")[0] not in known:
            near = difflib.get_close_matches(name.upper().partition("__")[0], known, 1, 0.6)
            hint = f"did you mean {near[0]}__KEY?" if near else f"expected {_PREFIX}SECTION__KEY"
            problems.append(f"environment variable {name}: unknown; {hint}")
    try:
        return _EnvironmentSource(Settings)()
    except SettingsError as error:
        problems.append(f"environment: {error}")
        return {}


def _validated(values: Mapping[str, Any]) -> tuple[Settings | None, list[str]]:
    """The settings, and what is wrong with them by their own rules and by each service's."""
    problems: dict[str, None] = {}
    settings: Settings | None = None
    try:
        settings = Settings(**values)
    except ValidationError as error:
        problems.update(dict.fromkeys(_messages(error)))
    for settings_class in SERVICE_SETTINGS.values():
        try:
            settings_class.model_validate(values)
        except ValidationError as error:
            problems.update(dict.fromkeys(_messages(error)))
    return settings, list(problems)


def _messages(error: ValidationError) -> list[str]:
    messages = []
    for problem in error.errors(include_url=False):
        place = ".".join(str(part) for part in problem["loc"] if part != "[key]")
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] != "value_error":
            message = f"{message[0].lower()}{message[1:]}, got {problem['input']!r}"
        elif "." not in place:
            # A rule between keys names them itself.
            place = ""
        messages.append(f"{place}: {message}" if place else message)
    return messages


def _place(name: str, origin: str) -> str:
    if origin == _ENVIRONMENT:
        return f"environment variable {_PREFIX}{name.upper().replace('.', '__')}"
    return f"{name} ({origin})"


def _listed(problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    return "\n".join([f"{len(problems)} problems in the settings:", *(f"  {problem}" for problem in problems)])


def _updated(
    values: Mapping[str, Any], newer: Mapping[str, Any], sections: Sections, by_key: Set[str], prefix: str = ""
) -> dict[str, Any]:
    """`newer` over `values`: sections key by key, and so the tables named in `by_key`; anything else whole."""
    merged = dict(values)
    for name, value in newer.items():
        old = merged.get(name)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            field = field_of(sections, name)
            section = section_class(field) if field is not None else None
            if section is not None:
                merged[name] = _updated(old, value, section, by_key, f"{prefix}{name}.")
                continue
            if prefix + name in by_key:
                merged[name] = {**old, **value}
                continue
        merged[name] = value
    return merged


def _tables_by_key(names: Sequence[str]) -> Set[str]:
    """The free tables of which these names (of one source) mean single keys only."""
    return {table for name in names if (table := table_of_key(name, Settings)) is not None} - set(names)


def _environment_names() -> list[str]:
    """Dotted names of the settings that the environment gives."""
    return [
        name.removeprefix(_PREFIX.lower()).replace("__", ".")
        for name in map(str.lower, os.environ)
        if name.startswith(_PREFIX.lower())
    ]
