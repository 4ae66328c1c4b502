"""What others may ask of the training loop, and what it shows of itself: one object between its thread and gRPC's."""

import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

State = Literal[
    "starting", "evaluating", "waiting", "training", "publishing", "checkpointing", "paused", "stopping", "done"
]

STOP_PATIENCE_S = 20.0
"""A run that shall stop waits so long for the end of its iteration, then gives the iteration up: nothing is lost but
its passes, for weights and optimizer change only in the step."""


class StopAskedError(Exception):
    """The run shall stop, and what is under way will not be over soon enough."""


@dataclass(frozen=True)
class TrainerStatus:
    """What the loop does now, and its latest figures."""

    state: State = "starting"
    waits_for: str = ""
    iteration: int = 0
    weight_version: int = -1
    waiting_rollouts: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class TrainerControl:
    """Requests to the training loop, which looks at them between two iterations, and its status."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._stop_asked = False
        self._give_up_at_s = math.inf
        self._checkpoint_asked = False
        self._paused_until_s = 0.0
        self._status = TrainerStatus()

    def ask_stop(self, patience_s: float = STOP_PATIENCE_S) -> None:
        """Ends the run at the end of the iteration that runs, with a checkpoint.

        Args:
            patience_s: how long the iteration is waited for at most.
        """
        with self._changed:
            self._stop_asked = True
            self._give_up_at_s = min(self._give_up_at_s, time.monotonic() + patience_s)
            self._changed.notify_all()

    def stop_asked(self) -> bool:
        """Whether the run shall stop."""
        with self._changed:
            return self._stop_asked

    def gives_up_iteration(self) -> bool:
        """Whether the run shall stop and has waited for its iteration long enough."""
        with self._changed:
            return time.monotonic() >= self._give_up_at_s

    def ask_checkpoint(self) -> None:
        """A checkpoint at the end of the iteration that runs."""
        with self._changed:
            self._checkpoint_asked = True

    def take_checkpoint_request(self) -> bool:
        """Whether a checkpoint was asked for; it counts as done."""
        with self._changed:
            asked, self._checkpoint_asked = self._checkpoint_asked, False
            return asked

    def pause(self, lease_s: float) -> None:
        """No further iteration for `lease_s` at most: whoever pauses must come again or lose the pause."""
        if not lease_s > 0:
            raise ValueError(f"lease_s is {lease_s}: expected seconds above 0")
        with self._changed:
            self._paused_until_s = time.monotonic() + lease_s
            self._changed.notify_all()

    def resume(self) -> None:
        """Ends a pause."""
        with self._changed:
            self._paused_until_s = 0.0
            self._changed.notify_all()

    def paused(self) -> bool:
        with self._changed:
            return self._paused_until_s > time.monotonic()

    def wait_while_paused(self, timeout_s: float) -> bool:
        """Waits for the end of a pause, for a stop or for `timeout_s`, whichever comes first.

        Returns:
            Whether the pause goes on.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                remaining_s = self._paused_until_s - time.monotonic()
                if remaining_s <= 0 or self._stop_asked:
                    return False
                if time.monotonic() >= deadline_s:
                    return True
                self._changed.wait(min(remaining_s, deadline_s - time.monotonic()))

    def show(self, state: State, waits_for: str = "", waiting_rollouts: int = 0) -> None:
        """What the loop does now."""
        with self._changed:
            self._status = replace(self._status, state=state, waits_for=waits_for, waiting_rollouts=waiting_rollouts)

    def note(self, sentence: str) -> None:
        """Tells whoever started the run something that is worth reading."""
        with self._changed:
            self._status = replace(self._status, notes=(*self._status.notes, sentence))

    def show_version(self, weight_version: int) -> None:
        """The newest version that was published, or is being so."""
        with self._changed:
            self._status = replace(self._status, weight_version=weight_version)

    def show_iteration(self, iteration: int, figures: Mapping[str, float]) -> None:
        """Finished iterations, and the figures of the last one."""
        with self._changed:
            self._status = replace(self._status, iteration=iteration)
        self.show_figures(figures)

    def show_figures(self, figures: Mapping[str, float]) -> None:
        """Newer figures; earlier ones of other names stay."""
        with self._changed:
            self._status = replace(self._status, metrics={**self._status.metrics, **figures})

    def status(self) -> TrainerStatus:
        with self._changed:
            return self._status
