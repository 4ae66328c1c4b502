"""Ends the wait for what will not come: says when nothing of a run has moved for too long, and who waits for whom.

What counts as motion: steps of engines and answers (the scheduler tells), iterations and phases of the trainer, and the
work of processes that tell nothing while they do it (an engine that starts, a pass, a checkpoint, a transfer), seen by
the processor time that they use. A process that waits uses next to none. Pure: processes and time are arguments.
"""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

from streamrl.command.figures import trainer_sentence
from streamrl.command.observer import Observation
from streamrl.progress import fleet_mark

_WORKING_SHARE = 0.05
"""Of a core: a process that waits uses under 0.02."""
_LONGEST_WINDOW_S = 30.0
_WINDOWS = 4
"""Processor time is compared this often at least within the time that a run may stand still."""


@dataclass(frozen=True)
class ProcessView:
    """A process of the run as the system sees it."""

    service: str
    """trainer, generator, scheduler, weights or broker."""
    instance: str
    pid: int
    own_cpu_s: float
    """Processor time of the process itself, since it started."""
    tree_cpu_s: float
    """The same with all of its descendants."""
    is_stopped: bool = False
    """By SIGSTOP, a debugger or a terminal."""


class Watchdog:
    """One attempt of a run."""

    def __init__(self, no_progress_s: float, now_s: float) -> None:
        """
        Args:
            no_progress_s: how long nothing may move; 0: for ever.
        """
        self._no_progress_s = no_progress_s
        self._window_s = min(_LONGEST_WINDOW_S, no_progress_s / _WINDOWS)
        self._moved_s = now_s
        self._marks: dict[str, Hashable] = {}
        self._window_began_s = now_s
        self._cpu_before_s: dict[int, float] = {}

    def wants_processes(self, now_s: float) -> bool:
        """Whether the next `look` needs the processes: seldom, for they cost a little to look at."""
        return self._no_progress_s > 0 and now_s - self._window_began_s >= self._window_s

    def look(self, observation: Observation, processes: Iterable[ProcessView], now_s: float) -> str | None:
        """Looks at the run.

        Args:
            processes: empty unless `wants_processes`.

        Returns:
            Who waits for whom, when nothing has moved for too long.
        """
        if self._no_progress_s == 0:
            return None
        processes = list(processes)
        # Both are asked in any case: each notes what it sees.
        if any([self._tells_news(observation), self._works(observation, processes, now_s)]):
            self._moved_s = now_s
        if processes and now_s - self._moved_s >= self._no_progress_s:
            waits = "; ".join(who_waits(observation, processes))
            return f"nothing has moved for {now_s - self._moved_s:.0f} s (run.no_progress_s): {waits}"
        return None

    def _tells_news(self, observation: Observation) -> bool:
        """Whether trainer or scheduler say something new, or the run is paused. That one of them is away for a while is
        no news, and neither is that it then says the same again."""
        trainer, fleet = observation.trainer, observation.fleet
        marks: dict[str, Hashable] = {}
        if trainer is not None:
            marks["trainer"] = (trainer.iteration, trainer.weight_version, trainer.state, trainer.waits_for)
        if fleet is not None:
            marks["fleet"] = fleet_mark(fleet)
        is_new = any(self._marks.get(name) != mark for name, mark in marks.items())
        self._marks |= marks
        return is_new or (trainer is not None and observation.trainer_answers and trainer.state == "paused")

    def _works(self, observation: Observation, processes: Iterable[ProcessView], now_s: float) -> bool:
        """Whether a process has worked since the last time that processes were looked at."""
        used = {process.pid: _working_cpu_s(process, observation) for process in processes}
        if not used:
            return False
        passed_s = now_s - self._window_began_s
        works = any(cpu_s - self._cpu_before_s.get(pid, 0.0) > _WORKING_SHARE * passed_s for pid, cpu_s in used.items())
        self._window_began_s, self._cpu_before_s = now_s, used
        return works


def _working_cpu_s(process: ProcessView, observation: Observation) -> float:
    """The processor time that is work: not that of processes which may turn while they wait, as engines of several
    workers do, other ranks, and those that try to reach somebody."""
    if process.service in ("trainer", "weights"):
        return process.own_cpu_s
    if process.service == "generator" and process.pid not in observation.registered_pids:
        return process.tree_cpu_s
    return 0.0


def who_waits(observation: Observation, processes: Iterable[ProcessView]) -> Iterator[str]:
    """Sentences, the trainer's first."""
    trainer = observation.trainer
    if trainer is not None and observation.trainer_answers and trainer.state in ("waiting", "evaluating"):
        yield f"trainer waits for {trainer.waits_for}"
    elif trainer is not None and not observation.trainer_answers and trainer.waits_for:
        yield f"trainer does not answer (it waited for {trainer.waits_for})"
    else:
        yield trainer_sentence(observation).replace(": ", " is ", 1).replace(" is does", " does")
    if observation.fleet is None:
        yield "scheduler does not answer"
    elif observation.fleet.waits:
        yield f"scheduler: {', '.join(observation.fleet.waits)}"
    if not observation.weights_answers:
        yield "weights does not answer"
    for process in processes:
        if process.is_stopped:
            yield f"{process.instance} (pid {process.pid}) is stopped by a signal"
        elif process.service == "generator" and process.pid not in observation.registered_pids:
            yield f"{process.instance} has not registered"
