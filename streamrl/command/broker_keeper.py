"""Keeps the embedded broker of a run alive, over all of its attempts.

One that keeps its topics on disk is started again at the same address, and nobody else notices more than a pause. One
that keeps them in memory has lost them: an empty one takes its place, and the run begins its next attempt.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from streamrl.command.broker import EmbeddedBroker
from streamrl.command.child_process import ChildProcess
from streamrl.command.death_reason import describe_exit
from streamrl.command.restart_policy import Death, Deaths, NextAttempt, decide
from streamrl.errors import ServiceDiedError
from streamrl.run_folder import ServiceRecord

logger = logging.getLogger(__name__)

_NAME = "broker"


class BrokerKeeper:
    """Use it from the main thread, with a running event loop."""

    def __init__(
        self, broker: EmbeddedBroker, log: Path, deaths: Deaths, *, max_restarts: int, on_change: Callable[[str], None]
    ) -> None:
        """
        Args:
            broker: started.
            log: where its output goes.
            on_change: called with a sentence whenever its process has ended or was started again.
        """
        self._broker = broker
        self._log = log
        self._child = ChildProcess(broker.process)
        self._deaths = deaths
        self._max_restarts = max_restarts
        self._on_change = on_change

    @property
    def record(self) -> ServiceRecord:
        """Its present process."""
        return ServiceRecord(
            service=_NAME,
            instance=_NAME,
            process=self._child.identity,
            address=self._broker.address,
            restarts=self._deaths.count(_NAME),
        )

    async def keep(self) -> NextAttempt:
        """Goes on until the topics are lost.

        Raises:
            ServiceDiedError: it has died too often.
        """
        while True:
            exit_code = await self._child.wait()
            ages_s = self._deaths.add(_NAME, time.monotonic())
            death = Death(_NAME, exit_code, loses_topics=not self._broker.is_durable)
            decision = decide(death, deaths_s=ages_s, max_restarts=self._max_restarts)
            how = f"the embedded broker ended ({describe_exit(exit_code)})"
            if decision.action == "fail":
                raise ServiceDiedError(
                    f"{how}, {len(ages_s)} times within an hour (run.max_restarts is {self._max_restarts}): see "
                    f"{self._log}. A Kafka cluster (kafka.bootstrap_servers) would outlive it."
                )
            if decision.action == "next_attempt":
                return NextAttempt(f"{how}, and what it held is lost", decision.delay_s)
            self._on_change(f"{how}: starting it again in {decision.delay_s:g} s")
            await asyncio.sleep(decision.delay_s)
            self._start_again()

    def replace(self) -> None:
        """Has another process take the place of one that has ended. Whoever needs it waits until it answers."""
        if not self._child.is_running:
            self._start_again()

    async def end(self, grace_s: float) -> None:
        """Ends it."""
        await self._child.end(grace_s)

    def _start_again(self) -> None:
        self._broker.start_again()
        self._child = ChildProcess(self._broker.process)
        logger.info("the broker is started again (pid %d)", self._broker.process.pid)
        self._on_change(f"broker started again (pid {self._broker.process.pid})")
