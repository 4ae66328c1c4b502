"""Time that jumps from one thing that happens to the next, for what goes by its event loop's clock.

Work in threads is not waited for.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class JumpingSelector(selectors.DefaultSelector):
    """Does not wait: time has passed."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "everything waits for ever"
        self.now_s += timeout
        return super().select(0)


class JumpingLoop(asyncio.SelectorEventLoop):
    """Whatever would be waited for is there at once, and its clock says that it was waited for."""

    def __init__(self) -> None:
        self._jumping = JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run(scenario: Coroutine[Any, Any, T]) -> T:
    """Runs it on a loop of its own.

    Returns:
        What it returns.
    """
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(scenario)
