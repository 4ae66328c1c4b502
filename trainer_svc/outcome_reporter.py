"""Tells the scheduler what became of samples, in a thread, and learns from its answers which it has given up."""

import logging
import threading
import time
from collections.abc import Callable, Iterable

from streamrl.errors import RefusedError, UnavailableError
from streamrl.identity import BatchKey
from streamrl.rpc.channel import open_channel
from streamrl.rpc.errors import peer_errors
from streamrl.v1.scheduler_pb2 import (
    FLEET_PHASE_GENERATE,
    FLEET_PHASE_UNSPECIFIED,
    AbandonedSample,
    ClosedBatch,
    FleetPhase,
    ReportBatchRequest,
    ReportBatchResponse,
    SampleOutcome,
    TrainerPace,
)
from streamrl.v1.scheduler_pb2_grpc import SchedulerServiceStub

logger = logging.getLogger(__name__)

_LINGER_S = 0.1
"""Outcomes wait for others for so long, then go together."""
_IDLE_INTERVAL_S = 1.0
"""Without outcomes, a report goes this often: its answer says which samples were given up."""
_RETRY_S = 0.5
_MAX_OUTCOMES = 10_000


class OutcomeReporter:
    """The trainer's side of `ReportBatch`."""

    def __init__(
        self,
        address: str,
        *,
        run_id: str,
        attempt: int,
        tokenizer_digest: str,
        deadline_s: float,
        patience_s: float,
        known_outcomes: Callable[[], tuple[list[SampleOutcome], list[BatchKey]]],
        on_abandoned: Callable[[Iterable[AbandonedSample]], None],
        on_error: Callable[[BaseException], None],
        phase: Callable[[], FleetPhase.ValueType] = lambda: FLEET_PHASE_GENERATE,
        redispatched: int = 0,
    ) -> None:
        """
        Args:
            known_outcomes: all there are of open batches, and the closed batches, for a scheduler in a new life.
            on_abandoned: given-up samples, possibly again and again.
            on_error: the scheduler refuses, or did not answer for `patience_s`; the thread has ended.
            phase: that the fleet is to be in, for a scheduler in a new life.
            redispatched: samples dispatched again before a checkpoint that this run continues.
        """
        self._address = address
        self._run_id = run_id
        self._attempt = attempt
        self._tokenizer_digest = tokenizer_digest
        self._deadline_s = deadline_s
        self._patience_s = patience_s
        self._known_outcomes = known_outcomes
        self._on_abandoned = on_abandoned
        self._on_error = on_error
        self._phase = phase
        self._changed = threading.Condition()
        self._outcomes: list[SampleOutcome] = []
        self._closed_batches: list[BatchKey] = []
        self._pace: TrainerPace | None = None
        self._ending = False
        self._scheduler_incarnation: int | None = None
        self._redispatched_before = redispatched
        self._redispatched_now = 0
        self._thread = threading.Thread(target=self._run, name="outcome-reporter", daemon=True)

    def start(self) -> "OutcomeReporter":
        self._thread.start()
        return self

    def report(self, outcome: SampleOutcome) -> None:
        """Queues one outcome."""
        with self._changed:
            self._outcomes.append(outcome)
            self._changed.notify_all()

    def close_batch(self, key: BatchKey) -> None:
        """Queues that a batch is over."""
        with self._changed:
            self._closed_batches.append(key)
            self._changed.notify_all()

    def set_pace(self, pace: TrainerPace) -> None:
        """What reports say from now on of how fast training is."""
        with self._changed:
            self._pace = pace

    @property
    def redispatched(self) -> int:
        """Train samples given to an instance a second or later time, over all lives of the scheduler."""
        with self._changed:
            return self._redispatched_before + self._redispatched_now

    def close(self) -> None:
        """Sends what is queued, once, and ends."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(self._deadline_s + 2 * _RETRY_S)

    def _run(self) -> None:
        try:
            with open_channel(self._address) as channel:
                self._report_until_end(SchedulerServiceStub(channel))
        except (UnavailableError, RefusedError) as error:
            self._on_error(error)

    def _report_until_end(self, stub: SchedulerServiceStub) -> None:
        answered_s = time.monotonic()
        while True:
            ending = self._wait_for_work()
            request, taken = self._next_request()
            try:
                with peer_errors(f"scheduler_svc at {self._address}"):
                    response = stub.ReportBatch(request, timeout=self._deadline_s)
            except UnavailableError as error:
                self._put_back(*taken)
                if ending:
                    logger.warning("the last outcomes were not reported: %s", error)
                    return
                if time.monotonic() - answered_s > self._patience_s:
                    raise
                logger.debug("outcomes will be reported again: %s", error)
                self._pause(_RETRY_S)
                continue
            answered_s = time.monotonic()
            self._learn(response)
            if ending:
                return

    def _wait_for_work(self) -> bool:
        """Returns when a report is due; True when it is the last one."""
        with self._changed:
            if not self._reconnects():
                self._changed.wait_for(lambda: self._has_work() or self._ending, _IDLE_INTERVAL_S)
            if self._has_work() and not self._ending:
                self._changed.wait_for(lambda: self._ending or len(self._outcomes) >= _MAX_OUTCOMES, _LINGER_S)
            return self._ending

    def _has_work(self) -> bool:
        return bool(self._outcomes or self._closed_batches)

    def _reconnects(self) -> bool:
        return self._scheduler_incarnation is None

    def _next_request(self) -> tuple[ReportBatchRequest, tuple[list[SampleOutcome], list[BatchKey]]]:
        with self._changed:
            taken = self._outcomes, self._closed_batches
            self._outcomes, self._closed_batches = [], []
            complete, pace = self._reconnects(), self._pace
        # Asked for after the queue was emptied, so that nothing is in neither.
        known_outcomes, known_closed = self._known_outcomes() if complete else ([], [])
        request = ReportBatchRequest(
            run_id=self._run_id,
            attempt=self._attempt,
            outcomes=[*known_outcomes, *taken[0]],
            closed=[ClosedBatch(purpose=purpose, batch=batch) for purpose, batch in (*known_closed, *taken[1])],  # type: ignore[arg-type]
            complete=complete,
            tokenizer_digest=self._tokenizer_digest,
            phase=self._phase() if complete else FLEET_PHASE_UNSPECIFIED,
            trainer_pace=pace,
        )
        return request, taken

    def _put_back(self, outcomes: list[SampleOutcome], closed_batches: list[BatchKey]) -> None:
        with self._changed:
            self._outcomes[:0] = outcomes
            self._closed_batches[:0] = closed_batches

    def _learn(self, response: ReportBatchResponse) -> None:
        with self._changed:
            known, new = self._scheduler_incarnation, response.scheduler_incarnation
            if known is not None and known != new:
                logger.warning("the scheduler is in a new life (%d): it is told everything about the open batches", new)
                self._redispatched_before += self._redispatched_now
                self._redispatched_now = 0
                self._scheduler_incarnation = None
            else:
                self._scheduler_incarnation = new
            self._redispatched_now = response.redispatched
        if response.abandoned:
            self._on_abandoned(response.abandoned)

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ending, seconds)
