"""SIGINT and SIGTERM over the life of `streamrl run`, without a gap in which one of them would end it halfway.

Before the run they interrupt; while it runs they ask it to stop; once it is over, what is left is to say how it ended.
"""

import asyncio
import signal
from collections.abc import Callable


class StopSignals:
    """Takes both signals from now on. Make it in the main thread."""

    def __init__(self) -> None:
        self._on_signal: Callable[[], object] | None = self._interrupt
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def hand_to(self, on_signal: Callable[[], None]) -> None:
        """From now on a signal is a call of `on_signal` in the running event loop."""
        loop = asyncio.get_running_loop()
        self._on_signal = lambda: loop.call_soon_threadsafe(on_signal)

    def ignore(self) -> None:
        """From now on signals change nothing."""
        self._on_signal = None

    def _handle(self, _number: int, _frame: object) -> None:
        if self._on_signal is not None:
            self._on_signal()

    @staticmethod
    def _interrupt() -> None:
        raise KeyboardInterrupt
