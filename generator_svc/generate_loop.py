"""The work of an instance: samples go from the queue through the engine to the outbox, and weights change in between.

Everything happens on one event loop. Whoever has news (records, heartbeats, finished answers) puts it where it belongs
and wakes the loop; the loop does what the version gate says. It knows nothing of gRPC streams or Kafka readers.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from generator_svc.activity import Activity, ActivityLog
from generator_svc.answers import Answers
from generator_svc.assignment_queue import AssignmentQueue, Revocation
from generator_svc.engine import Engine, GenerationRequest, GenerationResult
from generator_svc.outbox import Outbox
from generator_svc.rollouts import failed_rollout, problem_of_result, rollout_of
from generator_svc.sample import Sample
from generator_svc.standstill import Standstill
from generator_svc.version_gate import GateState, Swap, Target, decide
from generator_svc.weight_switch import VersionGoneError, WeightSwitch
from streamrl.errors import EngineDiedError, StreamRLError
from streamrl.identity import SampleKey
from streamrl.v1.records_pb2 import Rollout

logger = logging.getLogger(__name__)


class GenerateLoop:
    """`run` it in one task; every other method is for the same event loop."""

    def __init__(
        self,
        engine: Engine,
        weights: WeightSwitch,
        outbox: Outbox,
        activity: ActivityLog,
        *,
        swap: Swap,
        lease_holds: Callable[[], bool],
        say_now: Callable[[], None],
    ) -> None:
        """
        Args:
            lease_holds: whether this incarnation may still send.
            say_now: there is something to tell the scheduler.
        """
        self._engine = engine
        self._weights = weights
        self._outbox = outbox
        self._activity = activity
        self._swap: Swap = swap
        self._lease_holds = lease_holds
        self._say_now = say_now
        self._changed = asyncio.Event()
        self._queue = AssignmentQueue()
        self._tasks: dict[SampleKey, asyncio.Task[None]] = {}
        self._interrupting: dict[SampleKey, asyncio.Task[None]] = {}
        self._newest = -1
        self._switching_to: Target | None = None
        self.standstill = Standstill(engine, self._changed.set)
        self.answers = Answers()
        self.draining = False
        self.generated_tokens = 0
        """Since the incarnation began."""
        self.finished_samples = 0
        """Since the incarnation began."""

    async def run(self) -> None:
        """Works until it is cancelled.

        Raises:
            ExceptionGroup: of what went wrong in the engine, in Kafka or on the way to new weights.
        """
        self._changed.set()
        async with asyncio.TaskGroup() as group:
            while True:
                await self._changed.wait()
                self._changed.clear()
                await self._follow_wishes()
                self._admit_and_switch(group)
                self._fetch_ahead()
                self._activity.become(self._current_activity())

    # What comes from outside.

    def begin(self, incarnation: int) -> None:
        """A new life."""
        self._outbox.begin(incarnation)
        self.generated_tokens = self.finished_samples = 0
        self._changed.set()

    def take(self, samples: Sequence[Sample]) -> None:
        """Samples to draw, as they are assigned."""
        if not self._lease_holds():
            return
        was_idle, all_taken = not (self._queue.waiting or self._queue.num_running), True
        for sample in samples:
            if self.draining or not self._queue.add(sample):
                self.answers.given_back(sample.key, sample.dispatch)
                all_taken = False
        # Work that could move is worth hearing of more often than an idle instance is.
        if not all_taken or (was_idle and self._queue.waiting):
            self._say_now()
        self._changed.set()

    def revoke(self, keys: Iterable[SampleKey]) -> None:
        """The scheduler wants these back."""
        answers = [(key, self._queue.revoke(key)) for key in keys]
        self._cancel(key for key, met in answers if met is Revocation.ABORT)
        self.answers.not_revoked(key for key, met in answers if met is Revocation.SENT)
        for key, met in answers:
            if met in (Revocation.REVOKED, Revocation.ABORT, Revocation.GIVEN_BACK):
                self.answers.given_back(key, self._queue.given_back_dispatch(key))
        # The scheduler asks again in each of its answers. What it was told before is told again, but not at once: until
        # a sample that is on its way here has come, each would have the other speak again without a pause.
        if any(met in (Revocation.REVOKED, Revocation.ABORT, Revocation.SENT) for _, met in answers):
            self._say_now()
        self._changed.set()

    def hand_over(self, keys: Iterable[SampleKey]) -> None:
        """The scheduler has a better place for these, begun or not: what there is of them goes along."""
        wanted = set(keys)
        running = [sample for sample in self._queue.running if sample.key in wanted]
        for sample in running:
            if sample.key not in self._interrupting:
                self._interrupting[sample.key] = asyncio.create_task(self._interrupt(sample))
        self.revoke(sorted(wanted - {sample.key for sample in running}))

    def revoke_unstarted(self, keys: Iterable[SampleKey]) -> None:
        """The scheduler has a better place for these, if they have not begun."""
        begun = {sample.key for sample in self._queue.running} - {sample.key for sample in self._unstarted()}
        wanted = list(keys)
        if kept := [key for key in wanted if key in begun]:
            self.answers.not_revoked(kept)
            self._say_now()
        # Of one that has begun after all, what there is goes along.
        self.hand_over([key for key in wanted if key not in begun])

    def announce(self, weight_version: int) -> None:
        """The newest version that the scheduler knows. Repeating it is harmless."""
        if weight_version > self._newest:
            logger.info("version=%d is announced", weight_version)
        self._newest = max(self._newest, weight_version)
        self._changed.set()

    async def abandon(self) -> None:
        """The lease is lost: aborts everything; nothing of it will be sent."""
        tasks = list(self._tasks.values())
        logger.warning("%d running and %d waiting samples are abandoned", len(tasks), len(self._queue.waiting))
        self._cancel(list(self._tasks))
        self._cancel_interrupts()
        self._queue = AssignmentQueue()
        self.answers.clear()
        await asyncio.gather(*tasks, return_exceptions=True)

    def give_back_unstarted(self) -> None:
        """From now on takes nothing; what has not begun goes back to the scheduler."""
        self.draining = True
        self.standstill.resume()
        unstarted = self._unstarted()
        waiting = self._queue.give_back_waiting()
        self.hand_over([sample.key for sample in unstarted])
        for sample in waiting:
            self.answers.given_back(sample.key, sample.dispatch)
        logger.info("draining: %d samples run on, %d are given back", len(self._tasks), len(waiting) + len(unstarted))
        self._say_now()

    def _unstarted(self) -> list[Sample]:
        """Samples that the engine has and has not begun. An estimate: it begins them by priority."""
        return sorted(self._queue.running, key=lambda sample: sample.priority)[self._engine.running() :]

    async def nothing_runs(self) -> None:
        """Waits until the engine has nothing."""
        while running := [task for task in self._tasks.values() if not task.done()]:
            await asyncio.wait(running)

    async def give_back_running(self, timeout_s: float) -> None:
        """Ends what still runs, so that others go on with it; what the engine does not hand out in time is aborted."""
        self.hand_over([sample.key for sample in self._queue.running])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.nothing_runs()
        self.revoke([sample.key for sample in self._queue.running])

    # What others may know.

    @property
    def num_running(self) -> int:
        """Samples that have begun, as far as the engine says."""
        return min(self._engine.running(), self._queue.num_running)

    def progress(self) -> dict[SampleKey, int]:
        """Tokens of the samples that have begun, those that they came with included."""
        drawn = self._engine.progress()
        return {
            sample.key: len(sample.prefix) + drawn[request_id]
            for sample in self._queue.running
            if (request_id := self._request_id(sample)) in drawn
        }

    @property
    def num_waiting(self) -> int:
        return len(self._queue.waiting) + self._queue.num_running - self.num_running

    @property
    def state(self) -> str:
        """In a word, as in GeneratorService.GetStatus."""
        if self.draining:
            return "draining"
        if self.standstill.paused:
            return "paused"
        if self.standstill.asleep:
            return "asleep"
        if self._switching_to is not None and self._queue.num_running == 0:
            return "switching"
        return "generating" if self._queue.num_running else "waiting"

    # What the loop does.

    async def _follow_wishes(self) -> None:
        nothing_runs = self._queue.num_running == 0 and self._switching_to is None
        if await self.standstill.follow(nothing_runs):
            self._say_now()

    def _admit_and_switch(self, group: asyncio.TaskGroup) -> None:
        if self.standstill.nothing_may_begin or self.draining:
            return
        decision = decide(self._queue.waiting, self._gate_state(), self._swap)
        self._queue.start(decision.admit)
        for sample in decision.admit:
            self._tasks[sample.key] = group.create_task(self._generate(sample))
        if decision.switch_to is not None:
            self._switching_to = decision.switch_to
            group.create_task(self._switch(decision.switch_to))

    def _fetch_ahead(self) -> None:
        if self._switching_to is None and not self.draining:
            self._weights.prefetch(self._newest)

    def _gate_state(self) -> GateState:
        return GateState(
            loaded=self._weights.loaded,
            newest=self._newest,
            switching_to=self._switching_to,
            num_running=self._queue.num_running,
            num_pinned_running=self._queue.num_pinned_running,
            running_batches=self._queue.running_batches,
        )

    async def _generate(self, sample: Sample) -> None:
        try:
            result = await self._engine.generate(
                GenerationRequest(
                    request_id=self._request_id(sample),
                    prompt_token_ids=list(sample.prompt_token_ids),
                    temperature=sample.temperature,
                    max_tokens=sample.max_tokens,
                    stop_token_ids=list(sample.stop_token_ids),
                    seed=sample.seed,
                    priority=sample.priority,
                    prefix_token_ids=list(sample.prefix.token_ids),
                )
            )
        except EngineDiedError:
            raise
        except (ValueError, StreamRLError) as error:
            self._fail(sample, str(error))
            return
        if result.finish_reason == "interrupted":
            self._handed_over(sample, result)
            return
        if problem := problem_of_result(sample, result):
            self._fail(sample, problem)
            return
        self.generated_tokens += len(result.token_ids)
        self._finish(sample, rollout_of(sample, result, time.time()))

    def _handed_over(self, sample: Sample, result: GenerationResult) -> None:
        if not self._lease_holds():
            return
        self.generated_tokens += len(result.token_ids)
        dispatch = self._queue.hand_over(sample)
        self._tasks.pop(sample.key, None)
        # Of what no engine could go on from only that which it came with goes along.
        usable = result.token_ids and not problem_of_result(sample, result)
        self.answers.given_back(sample.key, dispatch, sample.prefix.followed_by(result) if usable else None)
        self._say_now()
        self._changed.set()

    async def _interrupt(self, sample: Sample) -> None:
        # One that the engine does not have yet is left alone: the scheduler asks again.
        try:
            await self._engine.interrupt(self._request_id(sample))
        except EngineDiedError:
            pass  # whoever waits for an answer of it says so
        finally:
            self._interrupting.pop(sample.key, None)

    def _request_id(self, sample: Sample) -> str:
        return f"{self._outbox.incarnation}/{sample.key}/{sample.dispatch}"

    def _fail(self, sample: Sample, error: str) -> None:
        logger.warning("sample %s could not be generated: %s", sample.key, error)
        self._finish(sample, failed_rollout(sample, error, time.time()))

    def _finish(self, sample: Sample, rollout: Rollout) -> None:
        if not self._lease_holds():
            return
        rollout.dispatch = self._queue.finish(sample)
        self._outbox.send(rollout)
        self._tasks.pop(sample.key, None)
        self.finished_samples += 1
        self._changed.set()

    async def _switch(self, target: Target) -> None:
        try:
            report = await self._weights.switch(target)
            if self._queue.num_running:
                self._activity.switched(report.switch_s, report.weight_version)
        except VersionGoneError as error:
            gone = [sample for sample in self._queue.waiting if sample.exact_weight_version == target.weight_version]
            self._queue.start(gone)
            for sample in gone:
                self._fail(sample, str(error))
        finally:
            self._switching_to = None
            self._changed.set()
            self._say_now()

    def _cancel(self, keys: Iterable[SampleKey]) -> None:
        for key in keys:
            self._tasks.pop(key).cancel()

    def _cancel_interrupts(self) -> None:
        for task in self._interrupting.values():
            task.cancel()
        self._interrupting.clear()

    def _current_activity(self) -> Activity:
        loaded = self._weights.loaded
        if self.standstill.nothing_may_begin and self.standstill.asleep:
            return Activity("wait", "training")
        if self.standstill.paused:
            return Activity("wait", "pause")
        if self._queue.num_running:
            return Activity(
                "generate", batch=min(key.batch for key in self._queue.running_batches), weight_version=loaded
            )
        if self._switching_to is not None:
            return Activity("switch", weight_version=self._switching_to.weight_version)
        if self._queue.waiting:
            return Activity("wait", f"version {self._queue.waiting[0].required_version}", weight_version=loaded)
        return Activity("wait", "assignments", weight_version=loaded)
