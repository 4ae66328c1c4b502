"""SIGINT, SIGTERM and SIGHUP over the life of a command, without a gap in which one of them would end it halfway.

Before a run they interrupt; while it runs they ask it to stop; once it is over, what is left is to say how it ended.
"""

import signal
from collections.abc import Callable


class StopSignals:
    """Takes the signals from now on. Make it in the main thread."""

    def __init__(self) -> None:
        self._on_signal: Callable[[], object] = self._interrupt
        for number in _taken():
            signal.signal(number, self._handle)

    def hand_to(self, on_signal: Callable[[], None]) -> None:
        """From now on a signal is a call of `on_signal` in the running event loop."""
        # Imported here: the command line takes `ignore_stop_signals` from this file, and its --help is instant.
        from asyncio import get_running_loop

        loop = get_running_loop()
        self._on_signal = lambda: loop.call_soon_threadsafe(on_signal)

    def _handle(self, _number: int, _frame: object) -> None:
        self._on_signal()

    @staticmethod
    def _interrupt() -> None:
        # What was begun is undone on the way out, within seconds: another signal must not cut that short.
        ignore_stop_signals()
        raise KeyboardInterrupt


def ignore_stop_signals() -> None:
    """From now on signals change nothing, the exit code included: left to the system, they hold while Python ends."""
    for number in _taken():
        signal.signal(number, signal.SIG_IGN)


def _taken() -> list[signal.Signals]:
    """The signals that mean stop. Whoever has SIGHUP ignored (nohup) wants the run to outlive the terminal."""
    hang_up = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hang_up]
