"""What the system says of a run's processes: processor time, and whether they are stopped."""

from collections.abc import Iterable, Iterator

import psutil

from streamrl.command.watchdog import ProcessView
from streamrl.run_folder import ServiceRecord


def view_processes(services: Iterable[ServiceRecord]) -> Iterator[ProcessView]:
    """Those that live."""
    for service in services:
        pid = service.process.pid
        try:
            process = psutil.Process(pid)
            own_s = _cpu_s(process)
            tree_s = own_s + sum(_descendants_cpu_s(process))
            is_stopped = process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        except psutil.NoSuchProcess:
            continue
        yield ProcessView(service.service, service.instance, pid, own_s, tree_s, is_stopped)


def _descendants_cpu_s(process: psutil.Process) -> Iterator[float]:
    for child in process.children(recursive=True):
        try:
            yield _cpu_s(child)
        except psutil.NoSuchProcess:
            continue


def _cpu_s(process: psutil.Process) -> float:
    """With that of children that have ended, such as compilers."""
    times = process.cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)
