import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer_svc.run_log import RunLog, TrackedStatus


class FakeTracker:
    """Fails as often as it is told to, then notes what it gets."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.noted: list[Any] = []
        self.released = threading.Event()
        self.released.set()

    def start(self) -> str:
        self._maybe_fail()
        return "run-7"

    def log_figures(self, step: int, figures: Mapping[str, float], time_s: float) -> None:
        self.released.wait()
        self._maybe_fail()
        self.noted.append((step, dict(figures)))

    def log_rows(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        self._maybe_fail()
        self.noted.append((step, list(rows)))

    def log_folder(self, folder: Path, name: str) -> None:
        self.noted.append(name)

    def end(self, status: TrackedStatus) -> None:
        self.noted.append(status)

    def _maybe_fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("the tracker is away")


def test_everything_is_logged_in_order_and_the_run_ends_with_its_status() -> None:
    tracker = FakeTracker()
    log = RunLog(lambda: tracker).start()
    log.figures(1, {"reward/mean": 0.5})
    log.rows(1, [{"answer": "48 49"}])
    log.rows(2, [])
    log.folder(Path("model"), "model")
    log.close("FINISHED", timeout_s=10)
    assert tracker.noted == [(1, {"reward/mean": 0.5}), (1, [{"answer": "48 49"}]), "model", "FINISHED"]
    assert (log.tracker_run_id, log.dropped) == ("run-7", 0)


def test_a_failure_is_tried_again() -> None:
    tracker = FakeTracker(failures=1)
    log = RunLog(lambda: tracker).start()
    log.figures(1, {"reward/mean": 0.5})
    log.close("FINISHED", timeout_s=10)
    assert tracker.noted == [(1, {"reward/mean": 0.5}), "FINISHED"]
    assert log.dropped == 0


def test_what_a_dead_tracker_does_not_take_is_dropped_with_one_warning(caplog: Any) -> None:
    tracker = FakeTracker(failures=1000)
    told: list[str] = []
    log = RunLog(lambda: tracker, tell=told.append).start()
    for step in range(5):
        log.figures(step, {"reward/mean": 0.5})
    log.close("FAILED", timeout_s=20)
    # With the run's begin and its end.
    assert log.dropped == 7
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
    (sentence,) = told
    assert "mlflow.tracking_uri" in sentence and "the tracker is away" in sentence


def test_a_tracker_that_cannot_even_be_made_is_survived() -> None:
    def unavailable() -> FakeTracker:
        raise ImportError("no tracker is installed")

    log = RunLog(unavailable).start()
    log.figures(1, {"reward/mean": 0.5})
    log.close("FINISHED", timeout_s=20)
    assert log.dropped == 3


def test_what_waits_for_the_tracker_is_known_until_it_has_it() -> None:
    tracker = FakeTracker()
    tracker.released.clear()
    log = RunLog(lambda: tracker).start()
    log.figures(1, {"reward/mean": 0.5})
    (waiting,) = log.unlogged()
    assert (waiting.step, waiting.figures) == (1, {"reward/mean": 0.5})
    tracker.released.set()
    log.close("KILLED", timeout_s=10)
    assert log.unlogged() == []

    again = FakeTracker()
    later = RunLog(lambda: again).start()
    later.take_up([waiting])
    later.close("FINISHED", timeout_s=10)
    assert again.noted == [(1, {"reward/mean": 0.5}), "FINISHED"]


def test_a_stuck_tracker_does_not_hold_up_the_end() -> None:
    tracker = FakeTracker()
    tracker.released.clear()
    log = RunLog(lambda: tracker).start()
    log.figures(1, {"reward/mean": 0.5})
    log.close("FINISHED", timeout_s=0.2)
    assert tracker.noted == []
    tracker.released.set()


def test_without_a_tracker_nothing_is_kept() -> None:
    log = RunLog(None).start()
    log.figures(1, {"reward/mean": 0.5})
    log.close("FINISHED", timeout_s=1)
    assert log.tracker_run_id == ""
