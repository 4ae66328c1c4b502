"""What is looked at before a run starts: ports, broker, memory, and what each service finds on this machine.

Nothing of the run is written or started here. What settings say about each other was checked by resolve.py.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from streamrl import lifetime
from streamrl.command.accelerators import gpu_shares, visible_gpus
from streamrl.command.broker import check_embedded
from streamrl.command.memory_needs import MemoryNeeds, memory_needs
from streamrl.command.ports import why_not_listen
from streamrl.command.settings import Settings
from streamrl.errors import StreamRLError
from streamrl.kafka.connection import Connection
from streamrl.run_folder import write_private

BROKER_TIMEOUT_S = 10.0
NOT_CHECKED_OFFLINE = (
    "whether the ports are free",
    "whether the broker of kafka.bootstrap_servers answers",
    "whether a model with a hub name can be downloaded",
    "whether reward models answer",
    "whether there are accelerators enough, and whether the model fits into their memory",
)
"""What a dry run leaves out."""

_ADDRESSES = ("trainer_address", "scheduler_address", "weights_address", "generator_address")
# Services whose --check looks at files and functions that the settings name.
_CHECKED_SERVICES = ("trainer", "generator")
_SERVICE_TIMEOUT_S = 60.0


def check_addresses(settings: Settings) -> None:
    """Raises ValueError when a service could not listen where the settings say."""
    rpc = settings.rpc
    problems = []
    for name in _ADDRESSES:
        reason = why_not_listen(getattr(rpc, name))
        if reason is not None:
            problems.append(f"rpc.{name} is {getattr(rpc, name)}: {reason}. Choose another, or port 0 for a free one")
    if settings.generator.num_instances > 1 and not rpc.generator_address.endswith(":0"):
        problems.append(
            f"rpc.generator_address is {rpc.generator_address}, but the {settings.generator.num_instances} generators "
            "of this machine cannot listen on one port: leave its port at 0"
        )
    fixed = [address for name in _ADDRESSES if not (address := getattr(rpc, name)).endswith(":0")]
    for address in sorted({address for address in fixed if fixed.count(address) > 1}):
        problems.append(f"{address} is given to two services in section rpc")
    if problems:
        raise ValueError("; ".join(problems))


def check_broker(settings: Settings) -> None:
    """Looks for the cluster that the settings name, or for what the embedded broker needs.

    Raises:
        ValueError: this machine has no embedded broker.
        BrokerUnavailableError: the cluster does not answer.
        RefusedError: it does not know us.
    """
    if settings.kafka.bootstrap_servers:
        Connection(settings.kafka, client_id="streamrl-command").check(BROKER_TIMEOUT_S)
    else:
        check_embedded(settings.kafka)


def check_memory(settings: Settings) -> MemoryNeeds | None:
    """About how much memory the run takes; None: not known before the model is there.

    Raises:
        ValueError: more than this machine has. With GPUs, which take most of it, nothing is compared.
    """
    needs = memory_needs(settings)
    available = psutil.virtual_memory().total
    if needs is not None and needs.total > available and not visible_gpus(os.environ):
        raise ValueError(
            f"the run needs about {needs}, and this machine has {available / 1024**3:.1f} GiB: take a smaller model, "
            "fewer generator.num_instances, or a smaller generator.kv_cache_gib"
        )
    return needs


def check_accelerators(settings: Settings) -> None:
    """Raises ValueError when this machine has GPUs, but too few of them."""
    gpu_shares(settings, visible_gpus(os.environ))


def check_services(settings: Settings) -> None:
    """Lets each service check the settings, all at once, each in a process of its own (they import large libraries).

    Raises:
        ValueError: with what they all found.
        StreamRLError: a check itself failed.
    """
    with TemporaryDirectory(prefix="streamrl-check-") as folder:
        settings_file = Path(folder) / "settings.json"
        write_private(settings_file, settings.model_dump_json())
        checks = {
            service: (
                lifetime.spawn(
                    [sys.executable, "-m", f"{service}_svc", str(settings_file), "--check"],
                    log=Path(folder) / f"{service}.log",
                ),
                Path(folder) / f"{service}.log",
            )
            for service in _CHECKED_SERVICES
        }
        deadline = time.monotonic() + _SERVICE_TIMEOUT_S
        try:
            outcomes = [_outcome(service, *check, deadline) for service, check in checks.items()]
        finally:
            for process, _ in checks.values():
                process.kill()
                process.wait()
    problems = [outcome for outcome in outcomes if outcome is not None]
    refused = [str(problem) for problem in problems if isinstance(problem, ValueError)]
    if refused:
        raise ValueError("; ".join(dict.fromkeys(refused)))
    if problems:
        raise problems[0]


def _outcome(
    service: str, process: "subprocess.Popen[bytes]", log: Path, deadline: float
) -> ValueError | StreamRLError | None:
    """What a check found; None: nothing."""
    try:
        exit_code = process.wait(max(deadline - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        return StreamRLError(f"{service}_svc has not checked its settings within {_SERVICE_TIMEOUT_S:g} s")
    if exit_code == 0:
        return None
    lines = log.read_text(errors="replace").splitlines()
    report = _last_report(lines)
    if report is None:
        return StreamRLError(f"the check of {service}_svc failed (exit code {exit_code}): {' / '.join(lines[-5:])}")
    if report["kind"] == "bad_input":
        return ValueError(report["message"])
    return StreamRLError(f"the check of {service}_svc failed: {report['kind']}: {report['message']}")


def _last_report(lines: Sequence[str]) -> dict[str, str] | None:
    """The {"kind": …, "message": …} that a failed service ends its output with."""
    for line in reversed(lines):
        if line.startswith("{"):
            try:
                report = json.loads(line)
            except json.JSONDecodeError:
                return None
            return report if isinstance(report, dict) and {"kind", "message"} <= report.keys() else None
    return None
