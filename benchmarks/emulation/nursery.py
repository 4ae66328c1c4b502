"""Starts the processes of emulated runs by forking: `python -m benchmarks.emulation.nursery`.

Each line of standard input, a settings file and an instance's name, becomes a process of its own, whose id is answered
on standard output. Twenty interpreters that each import the same libraries would take a minute of two cores a run. This
process has one thread and no connection, so that nothing is in the middle of anything when it forks.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from benchmarks.emulation import generator, trainer
from scheduler_svc import main as scheduler
from scheduler_svc.settings import SchedulerSettings
from streamrl import lifetime, service
from weights_svc import main as weights


def main() -> None:
    """Goes on until standard input ends; what it has started ends with it."""
    # The kernel then buries those that have ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    parent = os.getpid()
    for line in sys.stdin:
        settings_file, instance = json.loads(line)
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            lifetime.die_with_parent(parent)
            _become(Path(settings_file), instance)
        sys.stdout.write(f"{child}\n")
        sys.stdout.flush()


def _become(settings_file: Path, instance: str) -> NoReturn:
    log = settings_file.parent / "logs" / f"{instance}.log"
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for opened, standard in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(opened, standard)
    arguments = [str(settings_file), "--instance", instance]
    match instance.partition("-")[0]:
        case "trainer":
            code = service.main(trainer.SERVICE, arguments)
        case "generator":
            code = service.main(generator.SERVICE, arguments)
        case "weights":
            code = service.main(weights.SERVICE, arguments)
        case "scheduler":
            scheduling = service.Service("scheduler_svc", SchedulerSettings, scheduler.serve)
            code = service.main(scheduling, arguments)
        case _:
            raise ValueError(f"there is no service for {instance}")
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
