"""What is looked at before a run starts: ports, broker, memory, and what each service finds on this machine.

Nothing of the run is written or started here. What settings say about each other was checked by resolve.py.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from streamrl import lifetime
from streamrl.command.accelerators import gpu_shares, smallest_gpu_bytes, visible_gpus
from streamrl.command.broker import check_embedded
from streamrl.command.memory_needs import MemoryNeeds, memory_needs
from streamrl.command.ports import why_not_listen
from streamrl.command.settings import Settings
from streamrl.errors import StreamRLError
from streamrl.kafka.connection import Connection
from streamrl.rpc.trust import ROLES, Identity
from streamrl.run_folder import write_private
from trainer_svc.memory_plan import size_text

BROKER_TIMEOUT_S = 10.0

_ADDRESSES = ("trainer_address", "scheduler_address", "weights_address", "generator_address")
# Services whose --check looks at files and functions that the settings name.
_CHECKED_SERVICES = ("trainer", "generator", "scheduler")
_SERVICE_TIMEOUT_S = 600.0
"""The checks import large libraries, which takes minutes from a slow or busy disk."""
_SERVICE_WORD_S = 20.0
"""Between words about checks that last."""
_LOG_TAIL_LINES = 5


def not_checked_offline(settings: Settings) -> list[str]:
    """What a dry run leaves out."""
    reward_models = any("://" in name for name in settings.reward.functions)
    return [
        "whether the ports are free",
        *(["whether the broker of kafka.bootstrap_servers answers"] if settings.kafka.bootstrap_servers else []),
        "whether a model with a hub name can be downloaded",
        "what reward functions return",
        *(["whether reward models answer"] if reward_models else []),
        "rows of data files after the first 10,000",
        "whether there are accelerators enough",
    ]


def check_addresses(settings: Settings) -> None:
    """Raises ValueError when a service could not listen where the settings say, or would not be what others look for
    there."""
    rpc = settings.rpc
    problems = []
    if settings.weights.upstream is not None:
        problems.append(
            f"weights.upstream is {settings.weights.upstream}: leave it out, for the trainer of this run publishes to "
            "the weights_svc that is started beside it, and to a relay nothing is published"
        )
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


def check_trust(settings: Settings) -> None:
    """Raises ValueError when a service, or this command, could not show who it is."""
    if settings.rpc.trust is not None:
        for role in ROLES:
            Identity.load(settings.rpc.trust, role)


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
        ValueError: more than a device of the trainer's ranks has, where that is known, or, without GPUs, than this
            machine has.
    """
    needs = memory_needs(settings)
    if needs is None:
        return None
    gpus = visible_gpus(os.environ)
    device = settings.trainer.device_memory_gib
    device_bytes = int(device * 1024**3) if device is not None else smallest_gpu_bytes(gpus) if gpus else None
    if device_bytes is not None and needs.rank.peak > device_bytes:
        raise ValueError(
            f"each trainer rank needs about {needs.rank} on its device, which has {size_text(device_bytes)}: take "
            "trainer.gradient_checkpointing, a smaller trainer.micro_batch_tokens, a higher trainer.zero_stage with "
            "more trainer.num_ranks, trainer.offload, or trainer.lora_rank"
        )
    resting, taken = needs.rank.resting, settings.generator.gpu_memory_utilization
    shares_device = settings.pipeline.mode == "colocated" and bool(gpus)
    if shares_device and device_bytes is not None and resting > (1 - taken) * device_bytes:
        raise ValueError(
            f"each trainer rank keeps about {size_text(resting)} on its device while the engine there generates with "
            f"{taken:.0%} of its {size_text(device_bytes)} (pipeline.mode colocated): take a smaller "
            "generator.gpu_memory_utilization, trainer.offload, or a higher trainer.zero_stage with more "
            "trainer.num_ranks"
        )
    available = psutil.virtual_memory().total
    if gpus and needs.trainer_host > available:
        raise ValueError(
            f"the trainer's ranks need about {size_text(needs.trainer_host)} of this machine's memory for what "
            f"trainer.offload puts there and a snapshot, and it has {size_text(available)}: offload less, or take more "
            "trainer.num_nodes"
        )
    if device is None and not gpus and needs.total > available:
        raise ValueError(
            f"the run needs about {needs}, and this machine has {size_text(available)}: take a smaller model or "
            "trainer.micro_batch_tokens, fewer generator.num_instances, or a smaller generator.kv_cache_gib"
        )
    return needs


def check_accelerators(settings: Settings) -> None:
    """Raises ValueError when this machine has GPUs, but too few of them."""
    gpu_shares(settings, visible_gpus(os.environ))


def check_services(settings: Settings, say: Callable[[str], None]) -> None:
    """Lets each service check the settings, all at once, each in a process of its own (they import large libraries).

    Args:
        say: called with a sentence now and then while they last.

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
        try:
            _await_checks({service: process for service, (process, _) in checks.items()}, say)
            outcomes = [_outcome(service, *check) for service, check in checks.items()]
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


def _await_checks(checks: Mapping[str, "subprocess.Popen[bytes]"], say: Callable[[str], None]) -> None:
    """Waits for the end of all checks, as long as they may take."""
    begun_s = time.monotonic()
    while (age_s := time.monotonic() - begun_s) < _SERVICE_TIMEOUT_S:
        last = [service for service, process in checks.items() if process.poll() is None]
        if not last:
            return
        if age_s >= _SERVICE_WORD_S:
            names = " and ".join(f"{service}_svc" for service in last)
            say(f"still checking after {age_s:.0f} s: {names} (limit {_SERVICE_TIMEOUT_S:.0f} s)")
        with contextlib.suppress(subprocess.TimeoutExpired):
            checks[last[0]].wait(min(_SERVICE_WORD_S, _SERVICE_TIMEOUT_S - age_s))


def _outcome(service: str, process: "subprocess.Popen[bytes]", log: Path) -> ValueError | StreamRLError | None:
    """What a check found; None: nothing."""
    exit_code = process.poll()
    if exit_code == 0:
        return None
    lines = log.read_text(errors="replace").splitlines()
    if exit_code is None:
        said = f"its last lines: {' / '.join(lines[-_LOG_TAIL_LINES:])}" if lines else "it has said nothing"
        return StreamRLError(
            f"the check of {service}_svc still ran after {_SERVICE_TIMEOUT_S:g} s and was given up ({said}). Either "
            "this machine is very busy, or a module that the settings name (reward.functions) does not come back "
            "from its import"
        )
    report = _last_report(lines)
    if report is None:
        return StreamRLError(
            f"the check of {service}_svc failed (exit code {exit_code}): {' / '.join(lines[-_LOG_TAIL_LINES:])}"
        )
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
