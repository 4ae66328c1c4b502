"""What to do when a process of a run ends by itself: pure decisions. supervisor.py and conduct.py carry them out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from streamrl.errors import (
    CheckpointError,
    NoProgressError,
    StaleAttemptError,
    StorageError,
    StreamRLError,
    UnusableBatchError,
)

EXIT_BAD_INPUT = 2
WINDOW_S = 3600.0
"""Deaths longer ago do not count against a service."""

_FIRST_DELAY_S = 1.0
_LONGEST_DELAY_S = 30.0
_LONGEST_DOUBLINGS = 10
_FINAL: tuple[type[StreamRLError], ...] = (
    CheckpointError,
    NoProgressError,
    StaleAttemptError,
    StorageError,
    UnusableBatchError,
)
"""What another life would meet again."""
_FINAL_KINDS = frozenset(error.__name__ for error in _FINAL)


@dataclass(frozen=True)
class Decision:
    """`done`: it ended as it should. `restart`: start it again after `delay_s`. `next_attempt`: after `delay_s` take
    the run up again, all of it, from its newest checkpoint. `fail`: the run fails."""

    action: Literal["done", "restart", "next_attempt", "fail"]
    delay_s: float = 0.0


@dataclass(frozen=True)
class NextAttempt:
    """What runs cannot go on as it is: the run is to be taken up again from its newest checkpoint."""

    reason: str
    delay_s: float


@dataclass(frozen=True)
class Death:
    """The end of a process that nobody asked for."""

    service: str
    """trainer, generator, scheduler, weights or broker."""
    exit_code: int
    """Minus the number of the signal that killed it, where one did."""
    error_kind: str = ""
    """Class of the error that it left; empty: none."""
    was_ready: bool = True
    """Whether it had done its work, in this life or an earlier one. One that fails before fails the run at once, with
    its own error: another try would meet the same settings, the same model and the same machine."""
    in_vain: bool = False
    """Whether it failed by an error, as its life before did, and no iteration was finished in between."""
    run_is_completed: bool = False
    """Whether the trainer had said so before."""
    loses_topics: bool = False
    """For the broker: what it held is gone."""


def decide(death: Death, *, deaths_s: Sequence[float], max_restarts: int) -> Decision:
    """What becomes of the run.

    The trainer ends a run when it is done, and a generator may be drained. Whatever dies otherwise comes back: the
    trainer, and a broker that has lost its topics, with a new attempt of the whole run; the others alone.

    Args:
        deaths_s: ages in seconds of the deaths of the same process, this one (0) included.
        max_restarts: deaths within WINDOW_S that are made good.
    """
    # A trainer that has said that the run is completed has nothing left to do but to end, however it does that.
    if death.service == "trainer" and death.run_is_completed:
        return Decision("done")
    if death.exit_code == 0 and death.service in ("trainer", "generator"):
        return Decision("done")
    # A signal comes from outside (a kill, the kernel short of memory): it says nothing about the settings.
    if death.exit_code > 0 and (not death.was_ready or death.error_kind in _FINAL_KINDS):
        return Decision("fail")
    if death.service == "trainer" and death.in_vain:
        return Decision("fail")
    recent = sum(age <= WINDOW_S for age in deaths_s)
    if recent > max_restarts:
        return Decision("fail")
    delay_s = min(_FIRST_DELAY_S * 2 ** min(recent - 1, _LONGEST_DOUBLINGS), _LONGEST_DELAY_S)
    return Decision("next_attempt" if death.service == "trainer" or death.loses_topics else "restart", delay_s)


class Deaths:
    """When which process died, over all attempts of a run inside one command."""

    def __init__(self) -> None:
        self._at_s: dict[str, list[float]] = {}
        self._failed_at: dict[str, int] = {}

    def add(self, instance: str, now_s: float) -> list[float]:
        """Notes a death.

        Returns:
            The ages of all deaths of this process within WINDOW_S, this one included.
        """
        deaths = self._at_s.setdefault(instance, [])
        deaths.append(now_s)
        return [now_s - at_s for at_s in deaths if now_s - at_s <= WINDOW_S]

    def fails_in_vain(self, instance: str, exit_code: int, iteration: int) -> bool:
        """Notes with which exit code a process died, and after how many finished iterations of the run.

        Returns:
            Whether it had failed by an error at the very same one before.
        """
        before = self._failed_at.pop(instance, None)
        if exit_code > 0:
            self._failed_at[instance] = iteration
        return exit_code > 0 and before == iteration

    def count(self, instance: str) -> int:
        """How often it died."""
        return len(self._at_s.get(instance, ()))
