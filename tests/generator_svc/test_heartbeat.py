"""When an instance speaks. Leases and broken streams are in test_main.py, over real connections."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from generator_svc import heartbeat
from generator_svc.heartbeat import Heartbeat


def test_an_interval_that_becomes_shorter_than_what_has_passed_is_no_delay_of_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: clock.now))

    async def main() -> None:
        spoken = Heartbeat(cast(Any, None), "scheduler_svc")
        spoken._interval_s = 1000.0
        pause = asyncio.create_task(spoken._pause())
        await asyncio.sleep(0)
        clock.now, spoken._interval_s = 5.0, 1.0
        spoken._look_up.set()
        await pause
        assert spoken.event_loop_lag_s == 0.0

    asyncio.run(main())
