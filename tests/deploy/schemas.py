"""Schemas that are not part of this project, and a check that refuses what they do not name."""

import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
KUBERNETES_VERSION = "1.35"


def skip_or_fail(reason: str) -> None:
    """What a check says that lacks a tool: under CI it must have been there."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def schema_file(name: str) -> Path:
    """A file in the folder that SCHEMAS_HOME names."""
    path = Path(os.environ.get("SCHEMAS_HOME") or "/nonexistent") / name
    if not path.exists():
        skip_or_fail(f"SCHEMAS_HOME names no folder that has {name}")
    return path


@cache
def strimzi_schema(kind: str) -> dict[str, Any]:
    """Of a custom resource of Strimzi, in API version v1."""
    (folder,) = schema_file(".").glob("strimzi-*")
    definition = yaml.safe_load((folder / f"{kind.lower()}.yaml").read_text())
    (version,) = [version for version in definition["spec"]["versions"] if version["name"] == "v1"]
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return schema


def problems_of(resource: Mapping[str, Any], schema: Mapping[str, Any]) -> list[str]:
    """What is wrong with a resource, unknown fields included, which an API server would drop in silence."""
    validator = jsonschema.Draft202012Validator(schema)
    wrong = [f"{error.json_path}: {error.message}" for error in validator.iter_errors(resource)]
    # Metadata is the API server's own type, of which definitions say only that it is an object.
    content = {name: value for name, value in resource.items() if name not in ("apiVersion", "kind", "metadata")}
    return [*wrong, *_unknown_fields(content, schema, "")]


def _unknown_fields(value: Any, schema: Mapping[str, Any], place: str) -> Iterator[str]:
    if schema.get("x-kubernetes-preserve-unknown-fields") or schema.get("additionalProperties") is True:
        return
    if isinstance(value, Mapping):
        named, others = schema.get("properties", {}), schema.get("additionalProperties")
        for name, child in value.items():
            if name in named:
                yield from _unknown_fields(child, named[name], f"{place}.{name}")
            elif isinstance(others, Mapping):
                yield from _unknown_fields(child, others, f"{place}.{name}")
            else:
                yield f"{place}.{name}: unknown field"
    elif isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        for index, child in enumerate(value):
            yield from _unknown_fields(child, schema["items"], f"{place}[{index}]")
