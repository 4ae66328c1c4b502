"""deploy/kubernetes as kustomize builds it, and what each resource names of others."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from tests.deploy.schemas import ROOT, skip_or_fail

FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("one-cluster", "one-cluster-gpu", "two-sites/training", "two-sites/generation")
Resource = dict[str, Any]


def kubectl() -> str:
    """The program; tools/fetch_kubectl.py puts it into .venv."""
    program = ROOT / ".venv" / "bin" / "kubectl"
    if program.exists():
        return str(program)
    if found := shutil.which("kubectl", path=os.environ.get("PATH")):
        return found
    skip_or_fail("kubectl is not there: python tools/fetch_kubectl.py .venv/bin/kubectl brings it")
    raise AssertionError


@cache
def built(overlay: str) -> tuple[Resource, ...]:
    """All resources of an overlay."""
    done = subprocess.run(
        [kubectl(), "kustomize", str(FOLDER / "overlays" / overlay)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def of_kind(overlay: str, *kinds: str) -> list[Resource]:
    return [resource for resource in built(overlay) if resource["kind"] in kinds]


def one(overlay: str, kind: str, name: str) -> Resource:
    """A resource by its name; a generated config map by the name before its digest."""
    (found,) = [
        resource
        for resource in of_kind(overlay, kind)
        if resource["metadata"]["name"] == name or resource["metadata"]["name"].rpartition("-")[0] == name
    ]
    return found


@dataclass(frozen=True)
class Workload:
    """A resource that starts pods."""

    resource: Resource

    @property
    def name(self) -> str:
        return str(self.resource["metadata"]["name"])

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.resource["spec"]["template"]["metadata"]["labels"])

    @property
    def pod(self) -> dict[str, Any]:
        return dict(self.resource["spec"]["template"]["spec"])

    @property
    def container(self) -> dict[str, Any]:
        (container,) = self.pod["containers"]
        return dict(container)

    @property
    def environment(self) -> dict[str, str]:
        """What is set by value."""
        return {entry["name"]: entry["value"] for entry in self.container.get("env", []) if "value" in entry}

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}


def workloads(overlay: str) -> list[Workload]:
    return [Workload(resource) for resource in of_kind(overlay, "Deployment", "StatefulSet", "Job")]


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector means a pod with these labels."""
    same = all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items())
    expressions = selector.get("matchExpressions", [])
    assert all(expression["operator"] == "In" for expression in expressions)
    return same and all(labels.get(expression["key"]) in expression["values"] for expression in expressions)


def values_of(value: Any, name: str) -> Iterator[Any]:
    """Every value that stands under this name, however deep."""
    if isinstance(value, Mapping):
        for key, child in value.items():
            if key == name:
                yield child
            yield from values_of(child, name)
    elif isinstance(value, list):
        for child in value:
            yield from values_of(child, name)
