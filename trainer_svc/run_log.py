"""Logs the run to a tracker in a thread of its own: a slow or dead tracker neither stops nor slows training.

What cannot be logged is tried again, then dropped, with one warning and a counter; whoever started the run is told of
the first loss. MLflow itself is
trainer_svc/mlflow_tracker.py; what the figures mean is trainer_svc/figures.py.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

logger = logging.getLogger(__name__)

TrackedStatus = Literal["FINISHED", "FAILED", "KILLED"]

_QUEUE_LENGTH = 10_000
_DEAD_TRACKER_S = 15.0
"""A tracker that has lost something is not waited for any longer."""
_RETRY_WAITS_S = (0.5, 2.0)


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Figures of one step, and when they were."""

    step: int
    time_s: float
    """Unix time."""
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Job:
    what: str
    log: "Callable[[Tracker], None]"
    done: Callable[[], None]


@dataclass(frozen=True)
class Continued:
    """A run at the tracker that is continued."""

    run_id: str
    iteration: int
    """Of the checkpoint: later steps are done again."""
    open_evaluations: Collection[int]
    """Versions up to it whose evaluation is done again."""
    attempt: int
    """That goes on."""

    def forgets(self, step: int, *, is_evaluation: bool) -> bool:
        """Whether a figure or answer of a step will come again."""
        return step > self.iteration or (is_evaluation and step in self.open_evaluations)


class Tracker(Protocol):
    """Where a run is logged. Every method may raise anything and is then called again."""

    def start(self) -> str:
        """Begins the run, or continues it; returns its id there. Comes before all others."""
        ...

    def log_figures(self, step: int, figures: Mapping[str, float], time_s: float) -> None: ...

    def log_rows(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None: ...

    def log_folder(self, folder: Path, name: str) -> None: ...

    def end(self, status: TrackedStatus) -> None: ...


class RunLog:
    """A queue in front of a tracker."""

    def __init__(
        self, make_tracker: Callable[[], Tracker] | None, *, tell: Callable[[str], None] = lambda _sentence: None
    ) -> None:
        """
        Args:
            make_tracker: called in the thread, where heavy imports disturb nobody; None: nothing is logged.
            tell: gets one sentence, in any thread, when something is lost for the first time.
        """
        self._make_tracker = make_tracker
        self._tell = tell
        self._jobs: queue.Queue[_Job | None] = queue.Queue(_QUEUE_LENGTH)
        self._tracker: Tracker | None = None
        self._dropped = 0
        self._lock = threading.Lock()
        self._unlogged: dict[int, StepFigures] = {}
        self._num_figures = 0
        self._run_id = ""
        self._ended = False
        self._thread = threading.Thread(target=self._work, name="run-log", daemon=True)

    def start(self) -> "RunLog":
        if self._make_tracker is not None:
            self._put("the run's begin", lambda _tracker: None)
            self._thread.start()
        return self

    @property
    def tracker_run_id(self) -> str:
        """The run's id at the tracker; empty until it answered."""
        return self._run_id

    @property
    def dropped(self) -> int:
        """What could not be logged."""
        return self._dropped

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        """Logs figures at a step."""
        self._log_later(StepFigures(step, time.time(), dict(figures)))

    def take_up(self, unlogged: Iterable[StepFigures]) -> None:
        """Logs what an earlier attempt had not got to; what it had got to after all, the tracker knows by its time."""
        for figures in unlogged:
            self._log_later(figures)

    def unlogged(self) -> list[StepFigures]:
        """What waits for the tracker: a checkpoint keeps it, for the steps before it are not done again."""
        with self._lock:
            return list(self._unlogged.values())

    def _log_later(self, figures: StepFigures) -> None:
        if self._make_tracker is None:
            return
        with self._lock:
            self._num_figures += 1
            number = self._num_figures
            self._unlogged[number] = figures

        def log(tracker: Tracker) -> None:
            tracker.log_figures(figures.step, figures.figures, figures.time_s)

        def done() -> None:
            with self._lock:
                self._unlogged.pop(number, None)

        self._put(f"figures of step {figures.step}", log, done)

    def rows(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Adds rows to the table of sample answers."""
        if rows:
            self._put(f"answers of step {step}", lambda tracker: tracker.log_rows(step, rows))

    def folder(self, folder: Path, name: str) -> None:
        """Logs a folder, which must not change any more."""
        self._put(f"folder {folder}", lambda tracker: tracker.log_folder(folder, name))

    def close(self, status: TrackedStatus, timeout_s: float) -> None:
        """Ends the run with its true status, after what is queued; what takes longer than `timeout_s` is given up.

        A second call changes nothing.
        """
        if self._ended or not self._thread.is_alive():
            return
        self._ended = True
        self._put("the run's end", lambda tracker: tracker.end(status))
        try:
            self._jobs.put_nowait(None)
        except queue.Full:
            logger.warning("the tracker is too far behind: its run is left open")
            return
        if self._dropped:
            timeout_s = min(timeout_s, _DEAD_TRACKER_S)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("the tracker took longer than %g s: its run is left open", timeout_s)

    def _put(self, what: str, log: Callable[[Tracker], None], done: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            done: called when it has been logged, or given up.
        """
        if self._make_tracker is None:
            return
        try:
            self._jobs.put_nowait(_Job(what, log, done))
        except queue.Full:
            self._drop(what, "the tracker is too slow")
            done()

    def _work(self) -> None:
        healthy = True
        while (job := self._jobs.get()) is not None:
            # After a loss one try is enough until something works again: no queue shall grow behind a dead tracker.
            healthy = self._log(job.what, job.log, retry_waits_s=_RETRY_WAITS_S if healthy else ())
            job.done()

    def _log(self, what: str, log: Callable[[Tracker], None], retry_waits_s: Sequence[float]) -> bool:
        for wait_s in (*retry_waits_s, None):
            try:
                log(self._started_tracker())
                return True
            except Exception as error:  # trackers raise anything, and nothing of it may reach training
                if wait_s is None:
                    self._drop(what, error)
                else:
                    time.sleep(wait_s)
        return False

    def _started_tracker(self) -> Tracker:
        assert self._make_tracker is not None
        if self._tracker is None:
            self._tracker = self._make_tracker()
        if not self._run_id:
            self._run_id = self._tracker.start()
        return self._tracker

    def _drop(self, what: str, reason: object) -> None:
        self._dropped += 1
        level = logging.WARNING if self._dropped == 1 else logging.DEBUG
        logger.log(level, "%s could not be logged, and training goes on: %s", what, reason)
        if self._dropped == 1:
            first_line = next(iter(str(reason).splitlines()), type(reason).__name__)
            self._tell(
                f"the tracker (mlflow.tracking_uri) does not take {what}: {first_line}. Training goes on, and what "
                "cannot be logged is lost"
            )
