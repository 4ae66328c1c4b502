"""Progress of a run on standard error: a live table on a terminal, plain lines anywhere else.

Standard output is left to the one line of `--json`.
"""

import sys
import time
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from streamrl.command.figures import (
    duration,
    figures,
    fleet_sentence,
    instance_state,
    iteration_line,
    queue_depth,
    summary_rows,
    trainer_sentence,
    waits,
)
from streamrl.command.observer import Observation
from streamrl.v1.scheduler_pb2 import GetFleetResponse

_STATE_LINE_EVERY_S = 5.0
_SILENCE_S = 30.0
_FILE_WIDTH = 200


class Display(Protocol):
    """Where progress goes."""

    def step(self, sentence: str) -> None:
        """Something happened once: a service started, the broker is ready."""

    def update(self, observation: Observation) -> None:
        """The state of the run, about once a second."""

    def close(self) -> None:
        """No further progress."""


def open_display(num_generators: int) -> Display:
    """The display that fits standard error."""
    console = error_console()
    return LiveDisplay(console, num_generators) if console.is_terminal else LineDisplay(console, num_generators)


class LineDisplay:
    """Plain lines: one an iteration, and while there is none yet, one a change of what is waited for."""

    def __init__(self, console: Console, num_generators: int) -> None:
        self._console = console
        self._num_generators = num_generators
        self._started_s = time.monotonic()
        self._iteration = 0
        self._state = ""
        self._last_line_s = 0.0

    def step(self, sentence: str) -> None:
        self._line(sentence)

    def update(self, observation: Observation) -> None:
        status = observation.trainer
        if status is not None and status.iteration != self._iteration:
            # A trainer that takes the run up again begins where its checkpoint stands, once that is loaded.
            self._iteration = status.iteration
            if status.metrics:
                self._line(iteration_line(status))
                return
        silent_s = time.monotonic() - self._last_line_s
        if silent_s < _STATE_LINE_EVERY_S:
            return
        state = status.state if status is not None and observation.trainer_answers else ""
        if self._iteration == 0:
            # Nothing learns yet: whatever changes is news.
            state = "; ".join([trainer_sentence(observation), fleet_sentence(observation.fleet, self._num_generators)])
        if state != self._state or silent_s > _SILENCE_S:
            self._state = state
            self._line("; ".join([trainer_sentence(observation), *self._context(observation)]))

    def _context(self, observation: Observation) -> list[str]:
        """What stands beside the trainer's state: who is there at first, later who waits for whom."""
        if self._iteration == 0:
            return [fleet_sentence(observation.fleet, self._num_generators)]
        return waits(observation)

    def close(self) -> None:
        """Nothing to do: every line is out."""

    def _line(self, text: str) -> None:
        self._last_line_s = time.monotonic()
        age_s = self._last_line_s - self._started_s
        self._console.print(Text(f"{age_s:6.1f} s  {text}"), soft_wrap=True)


class LiveDisplay:
    """A table that is drawn anew in place; what happened once scrolls by above it."""

    def __init__(self, console: Console, num_generators: int, age_s: float = 0.0) -> None:
        """
        Args:
            age_s: of the run, when it began before this display.
        """
        self._console = console
        self._num_generators = num_generators
        self._started_s = time.monotonic() - age_s
        # Drawn by `update` alone: no thread of its own.
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._live.start()

    def step(self, sentence: str) -> None:
        self._console.print(Text(sentence, style="dim"))

    def update(self, observation: Observation) -> None:
        age_s = time.monotonic() - self._started_s
        self._live.update(run_table(observation, self._num_generators, age_s), refresh=True)

    def close(self) -> None:
        self._live.stop()


def run_table(observation: Observation, num_generators: int, age_s: float) -> Group:
    """The live table."""
    status, fleet = observation.trainer, observation.fleet
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    table.add_row("time", duration(age_s))
    table.add_row("trainer", trainer_sentence(observation).removeprefix("trainer: "))
    if status is not None and status.iteration:
        table.add_row(
            "iteration", f"{status.iteration} of {status.num_iterations}, weight version {status.weight_version}"
        )
        for label, value in figures(status.metrics):
            table.add_row(label, value)
    if fleet is None:
        return Group(table)
    outstanding, undispatched = queue_depth(fleet)
    waiting = status.waiting_rollouts if status is not None else 0
    table.add_row("queues", f"{undispatched} to dispatch, {outstanding} with generators, {waiting} to train")
    if not fleet.instances:
        table.add_row("generators", fleet_sentence(fleet, num_generators).removeprefix("generators: "))
        return Group(table)
    return Group(table, fleet_table(fleet), *(Text(f"  {wait}", style="yellow") for wait in waits(observation)))


def fleet_table(fleet: GetFleetResponse) -> Table:
    """The instances, one a row."""
    table = Table(box=None, padding=(0, 2), header_style="cyan")
    table.add_column("generator")
    table.add_column("state")
    for name in ("version", "running", "waiting", "outstanding"):
        table.add_column(name, justify="right")
    for instance in sorted(fleet.instances, key=lambda instance: (len(instance.instance), instance.instance)):
        beat = instance.heartbeat
        table.add_row(
            instance.instance,
            instance_state(instance),
            str(beat.weight_version),
            str(beat.running),
            str(beat.waiting),
            str(instance.outstanding),
        )
    return table


def show_summary(summary: dict[str, Any]) -> None:
    """The last line of a run as a table, for people."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for label, value in summary_rows(summary):
        table.add_row(label, value)
    error_console().print(table)


def error_console() -> Console:
    """Standard error for people. Off a terminal, lines are better whole than wrapped."""
    return Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else _FILE_WIDTH)


def output_console() -> Console:
    """Standard output for people, likewise."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _FILE_WIDTH)
