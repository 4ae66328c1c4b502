"""What to do when a service ends: a pure decision. The supervisor carries it out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

EXIT_BAD_INPUT = 2
WINDOW_S = 3600.0
"""Deaths longer ago do not count against a generator."""

_FIRST_DELAY_S = 1.0
_LONGEST_DELAY_S = 30.0


@dataclass(frozen=True)
class Decision:
    """`done`: it ended as it should. `restart`: start it again after `delay_s`. `fail`: the run fails."""

    action: Literal["done", "restart", "fail"]
    delay_s: float = 0.0


def decide(service: str, exit_code: int, *, was_ready: bool, deaths_s: Sequence[float], max_restarts: int) -> Decision:
    """What becomes of a run when one of its services ends by itself.

    The trainer ends a run; a generator may be drained, and comes back when it dies; no other service may end.

    Args:
        exit_code: minus the number of the signal that killed it, where one did.
        was_ready: whether this generator, in this life or an earlier one, had registered. One that never did fails the
            run at once, with its own error: another try would meet the same model and the same machine.
        deaths_s: ages in seconds of this generator's deaths, this one (0) included.
        max_restarts: deaths within WINDOW_S that are made good.
    """
    if exit_code == 0:
        return Decision("done") if service in ("trainer", "generator") else Decision("fail")
    if service != "generator" or exit_code == EXIT_BAD_INPUT:
        return Decision("fail")
    # A signal comes from outside (a kill, the kernel short of memory): it says nothing about the settings.
    if exit_code > 0 and not was_ready:
        return Decision("fail")
    recent = sum(age <= WINDOW_S for age in deaths_s)
    if recent > max_restarts:
        return Decision("fail")
    return Decision("restart", min(_FIRST_DELAY_S * 2 ** (recent - 1), _LONGEST_DELAY_S))
