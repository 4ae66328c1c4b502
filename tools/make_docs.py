"""Writes the reference pages that come from the code: `python tools/make_docs.py [--check]`.

docs/settings.md from the settings classes, docs/metrics.md from trainer_svc/figures.py. `--check` writes nothing and
exits 1 where a committed page differs.
"""

import argparse
import sys
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from streamrl.command.setting_names import section_class
from streamrl.command.settings import Settings
from trainer_svc.figures import FIGURES

DOCS = Path(__file__).resolve().parent.parent / "docs"


def settings_page() -> str:
    """Every setting: name, type, default, meaning."""
    parts = [
        "# Settings",
        "",
        "From the lowest to the highest: defaults, the TOML file, environment variables",
        "(`STREAMRL_TRAINER__NUM_ITERATIONS=5`), `--set trainer.num_iterations=5`. Unknown names are refused.",
    ]
    for name, field in Settings.model_fields.items():
        section = section_class(field)
        assert section is not None
        title = name
        if get_origin(section) is dict:
            section, title = get_args(section)[1], f"{name}.NAME"
        parts += ["", f"## `[{title}]`", "", "| setting | type | default | meaning |", "| --- | --- | --- | --- |"]
        parts += _rows(section)
    return "\n".join(parts) + "\n"


def _rows(section: type[BaseModel], prefix: str = "") -> list[str]:
    rows = []
    for key, setting in section.model_fields.items():
        inner = section_class(setting)
        rows += [_row(prefix + key, setting)] if inner is None else _rows(inner, f"{prefix}{key}.")
    return rows


def _row(name: str, field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    shown = "" if default in ("", {}, (), None) or field.is_required() else f"`{_toml(default)}`"
    meaning = " ".join((field.description or "").split())
    return f"| `{name}` | {_escaped(_kind(field.annotation))} | {_escaped(shown)} | {_escaped(meaning)} |"


def _kind(annotation: Any) -> str:
    """A type as people write it, without the rules on its values."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is None:
        return "None" if annotation is NoneType else getattr(annotation, "__name__", str(annotation))
    if origin is Annotated:
        return _kind(arguments[0])
    if origin in (Union, UnionType):
        return " | ".join(_kind(argument) for argument in arguments if argument is not NoneType)
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, arguments))}]"
    return f"{origin.__name__}[{', '.join('...' if argument is ... else _kind(argument) for argument in arguments)}]"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return str(value)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def metrics_page() -> str:
    """Every metric: name, unit, meaning."""
    parts = [
        "# Metrics",
        "",
        "In MLflow each has the training iteration as its step; the live table and `GetStatus` use the same names.",
        "",
        "| metric | unit | meaning |",
        "| --- | --- | --- |",
    ]
    parts += [f"| `{figure.name}` | {figure.unit} | {_escaped(figure.meaning)} |" for figure in FIGURES]
    return "\n".join(parts) + "\n"


PAGES = {"settings.md": settings_page, "metrics.md": metrics_page}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say which pages differ")
    check = parser.parse_args().check
    stale = []
    for name, make in PAGES.items():
        page, path = make(), DOCS / name
        if check and (not path.is_file() or path.read_text() != page):
            stale.append(name)
        elif not check:
            path.write_text(page)
    if stale:
        sys.stderr.write(
            f"stale: {', '.join(f'docs/{name}' for name in stale)}; run `make docs` and commit the result\n"
        )
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
