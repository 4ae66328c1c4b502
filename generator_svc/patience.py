"""Asks a peer that does not answer again, with growing pauses, until patience is over."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from streamrl.errors import StreamRLError, UnavailableError

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 2.0


async def patiently(
    call: Callable[[], Awaitable[Answer]],
    patience_s: float,
    retry_on: type[StreamRLError] | tuple[type[StreamRLError], ...] = UnavailableError,
) -> Answer:
    """Makes a call until it is answered.

    Args:
        call: makes the call anew each time, each with a deadline of its own.
        patience_s: counted from the first failure.

    Raises:
        StreamRLError: the last failure, when patience is over; any other at once.
    """
    pause_s = FIRST_PAUSE_S
    failing_since: float | None = None
    while True:
        try:
            return await call()
        except retry_on as error:
            now = time.monotonic()
            failing_since = now if failing_since is None else failing_since
            if now + pause_s - failing_since > patience_s:
                raise
            logger.info("trying again in %.1f s: %s", pause_s, error)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
