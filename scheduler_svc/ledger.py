"""Everything the scheduler knows and decides. No Kafka, gRPC or clock: events go in with the time, and what
`carry_out` returns is to be written.

The samples are in scheduler_svc/samples.py, the instances in scheduler_svc/registry.py, plans in
scheduler_svc/dispatcher.py; here is what brings them together: who may call, when dispatch may begin, who loses what.
"""

import logging
from collections.abc import Iterable, Sequence

from scheduler_svc.balance import unstarted_to_move
from scheduler_svc.dispatcher import Dispatcher, Draft, Outgoing, Placing
from scheduler_svc.lengths import LengthEstimates
from scheduler_svc.picture import Picture, Wish
from scheduler_svc.registry import Life, Move, Registry
from scheduler_svc.samples import SampleBook
from scheduler_svc.settings import SchedulerSettings
from streamrl.errors import RecordError, RefusedError, StaleAttemptError, UnavailableError
from streamrl.identity import BatchKey, SampleKey
from streamrl.planning.iteration import TrainerPace
from streamrl.v1.records_pb2 import Assignment, PromptRecord
from streamrl.v1.scheduler_pb2 import (
    FLEET_PHASE_GENERATE,
    FLEET_PHASE_TRAIN,
    FLEET_PHASE_UNSPECIFIED,
    AbandonedSample,
    DrainRequest,
    FleetPhase,
    GivenBack,
    HeartbeatRequest,
    HeartbeatResponse,
    RegisterRequest,
    RegisterResponse,
    ReportBatchRequest,
    ReportBatchResponse,
)

logger = logging.getLogger(__name__)

_LEAST_INTERVAL_S = 0.5
"""Between heartbeats of an instance."""
_MOST_HEARTBEATS = 250
"""A second, of the whole fleet."""


class Ledger:
    """The state of one life of the scheduler."""

    def __init__(
        self,
        settings: SchedulerSettings,
        *,
        incarnation: int,
        started_at: float,
        lengths: LengthEstimates | None = None,
    ) -> None:
        """
        Args:
            lengths: None: nothing but the history tells lengths.
            started_at: instances of an earlier life of the scheduler, which this one does not know, were last answered
                before then.
            incarnation: of this life of the scheduler, above those of earlier lives (Unix time in ms). Incarnations of
                instances count on from it.
        """
        self.settings = settings
        self.incarnation = incarnation
        self.old_leases_end_at = started_at + settings.scheduler.lease_s
        """When no instance of an earlier life of the scheduler generates any more what it was given then."""
        self.samples = SampleBook(
            max_dispatches=settings.scheduler.max_dispatches,
            max_staleness=settings.pipeline.max_staleness,
            lengths=lengths or LengthEstimates(),
        )
        self.registry = Registry(
            max_instances=settings.scheduler.max_instances,
            lease_s=settings.scheduler.lease_s,
            first_incarnation=incarnation,
        )
        self.newest_weight_version: int | None = None
        self.phase: FleetPhase.ValueType = FLEET_PHASE_UNSPECIFIED
        """Unspecified until the trainer has said it: instances stay as they are."""
        self.reported = False
        """Whether the trainer has said all that it knows. Before, a sample that is accepted already may look open."""
        self.fleet_open = False
        """Whether enough instances have come, or long enough been waited for."""
        self.run_ended = False
        """Whether no further prompts will come."""
        self.refused = 0
        """Calls of earlier lives of the run."""
        self.dead_letters = 0
        """Records that could not be handled here."""
        self._dispatcher = Dispatcher(settings, self.samples)
        self._trainer_pace: TrainerPace | None = None
        self._ahead: Draft | None = None
        """Of a batch that is not admitted yet."""
        self._tokenizer_digest = ""
        self._num_working = 0
        """Instances that run and do not drain, as of the last registration, drain or round."""

    # Records of topic `prompts`, and announcements of weights_svc.

    def take_record(self, record: PromptRecord) -> None:
        """
        Raises:
            RecordError: it makes no sense.
            StaleAttemptError: a later life of the run has begun, so this process must end.
        """
        attempt = self.settings.run.attempt
        if record.attempt > attempt:
            raise StaleAttemptError(
                f"attempt {record.attempt} of the run writes prompts, and this scheduler is of attempt {attempt}: "
                "the run was resumed elsewhere",
                record.attempt,
            )
        if record.attempt < attempt:
            # The topic has a longer memory than an attempt: the trainer has written anew what is still wanted.
            return
        match record.WhichOneof("kind"):
            case "prompt":
                self.samples.take_prompt(record.prompt)
            case "batch_end":
                self.samples.take_batch_end(record.batch_end)
            case "run_end":
                self.run_ended = True
            case _:
                raise RecordError("it is neither a prompt nor an end")

    def announce(self, weight_version: int, attempt: int) -> None:
        """The newest version there is. One that an earlier attempt has published says nothing: the trainer may be about
        to have it forgotten, and publishes the version that it begins with again, under its own attempt.

        Raises:
            StaleAttemptError: a later life of the run has begun, so this process must end.
        """
        if attempt > self.settings.run.attempt:
            raise StaleAttemptError(
                f"version {weight_version} is of attempt {attempt}, and this scheduler is of attempt "
                f"{self.settings.run.attempt}: the run was resumed elsewhere",
                attempt,
            )
        if attempt == self.settings.run.attempt and weight_version != self.newest_weight_version:
            self.newest_weight_version = weight_version
            self._tell_all()

    # Calls.

    def check_caller(self, run_id: str, attempt: int) -> None:
        """
        Raises:
            RefusedError: a call of another run.
            StaleAttemptError: a call of an earlier life of the run.
            UnavailableError: a call of a later one, whose prompts will tell this process to make way.
        """
        run = self.settings.run
        if run_id != run.id:
            raise RefusedError(f"a call for run {run_id!r} reached the scheduler of run {run.id!r}")
        if attempt < run.attempt:
            self.refused += 1
            message = f"a call of attempt {attempt}, and the run is in attempt {run.attempt}"
            raise StaleAttemptError(message, run.attempt)
        if attempt > run.attempt:
            raise UnavailableError(f"a call of attempt {attempt} reached a scheduler of attempt {run.attempt}")

    def register(self, request: RegisterRequest, now: float) -> RegisterResponse:
        """Begins a life of an instance; an earlier one is superseded, and has lost what it had.

        Raises:
            ValueError, RefusedError: as Registry.register and check_caller, or its tokenizer is not the trainer's.
        """
        self.check_caller(request.run_id, request.attempt)
        if self._tokenizer_digest and request.tokenizer_digest != self._tokenizer_digest:
            raise RefusedError(
                f"{request.instance} has a tokenizer of digest {request.tokenizer_digest or 'none'}, the trainer one "
                f"of {self._tokenizer_digest}: the same token ids are different texts. Start it from version 0 of "
                "this run"
            )
        life, superseded = self.registry.register(request, now)
        if superseded is not None:
            self._end(superseded, "began anew")
        self._count_working()
        return RegisterResponse(
            incarnation=life.incarnation,
            partition=life.partition,
            lease_s=self.settings.scheduler.lease_s,
            heartbeat_interval_s=self.heartbeat_interval_s(),
        )

    def heartbeat(self, request: HeartbeatRequest, now: float) -> None:
        """Notes an instance's state, and what it gives back. One of an unknown incarnation changes nothing: `answer`
        tells it.

        Raises:
            RefusedError: as check_caller.
        """
        self.check_caller(request.run_id, request.attempt)
        life = self.registry.find(request.instance, request.incarnation)
        if life is None:
            return
        for given_back in request.revoked:
            self._take_back(life, given_back)
        for sample_id in request.not_revoked:
            key = SampleKey.from_proto(sample_id)
            life.revokes.pop(key, None)
            if key in life.moves:
                del life.moves[key]
                if key in life.samples:
                    life.begun.add(key)
        life.hear(request, now)

    def heartbeat_interval_s(self) -> float:
        """How often instances should be heard of: seldom enough for the lease, but while there is work that could move
        as often as this process has time for. Every answer asks: it takes as long however large the fleet is."""
        seldom_s = self.settings.scheduler.heartbeat_interval_s
        if self._nothing_moves() or self._num_working < 2 or not self.samples.any_assigned:
            return seldom_s
        return min(seldom_s, max(_LEAST_INTERVAL_S, self._num_working / _MOST_HEARTBEATS))

    def _count_working(self) -> None:
        self._num_working = sum(life.runs() and not life.draining for life in self.registry.lives())

    def _take_back(self, life: Life, given_back: GivenBack) -> None:
        key = SampleKey.from_proto(given_back.id)
        sample = life.samples.get(key)
        if sample is not None and given_back.dispatch not in (0, sample.dispatch):
            # Said again of an earlier stay: by now it has the sample once more.
            return
        life.revokes.pop(key, None)
        move = life.moves.pop(key, None)
        if sample is not None:
            if given_back.HasField("prefix"):
                self.samples.hand_over(sample, given_back.prefix)
            self.samples.release(sample, f"given back by {life.name}", given_back=True)
            if move is not None:
                sample.moved_from, sample.moves_to = life, move.target

    def answer(self, instance: str, incarnation: int) -> HeartbeatResponse:
        """What an instance is to know now."""
        response = HeartbeatResponse(
            lease_s=self.settings.scheduler.lease_s,
            newest_weight_version=self.newest_weight_version,
            phase=self.phase,
            heartbeat_interval_s=self.heartbeat_interval_s(),
        )
        life = self.registry.find(instance, incarnation)
        if life is not None:
            response.lease_granted = True
            response.revoke.extend(key.to_proto() for key in life.revokes)
            for key, move in life.moves.items():
                if key not in life.revokes:
                    (response.hand_over if move.begun_too else response.revoke_unstarted).append(key.to_proto())
        return response

    def drain(self, request: DrainRequest, now: float) -> None:
        """An instance leaves, or has left.

        Raises:
            RefusedError: as check_caller.
        """
        self.check_caller(request.run_id, request.attempt)
        life = self.registry.find(request.instance, request.incarnation)
        if life is None:
            return
        if not life.draining:
            life.draining = True
            logger.info("%s drains: %s", life, request.reason or "no reason given")
        if request.stopped and life.stopped_at is None:
            life.stopped_at = now
            logger.info("%s has stopped with %d samples outstanding", life, len(life.samples))
        self._count_working()

    def report(self, request: ReportBatchRequest) -> ReportBatchResponse:
        """Takes from the trainer what became of samples.

        Raises:
            RefusedError: as check_caller.
            ValueError: an outcome is unknown.
        """
        self.check_caller(request.run_id, request.attempt)
        if request.tokenizer_digest:
            self._take_tokenizer_digest(request.tokenizer_digest)
        if request.HasField("trainer_pace"):
            self._trainer_pace = TrainerPace(request.trainer_pace.token_s, request.trainer_pace.pass_tokens)
        for outcome in request.outcomes:
            self.samples.take_outcome(outcome)
        for closed in request.closed:
            self.samples.close(BatchKey(closed.purpose, closed.batch))
        if request.complete and not self.reported:
            self.reported = True
            if self.phase == FLEET_PHASE_UNSPECIFIED:
                self.set_phase(request.phase or FLEET_PHASE_GENERATE)
            logger.info("the trainer has reported: %d batches are closed", len(self.samples.closed))
        return ReportBatchResponse(
            scheduler_incarnation=self.incarnation,
            abandoned=[
                AbandonedSample(id=key.to_proto(), reason=reason)
                for batch in self.samples.batches.values()
                for key, reason in batch.abandoned.items()
            ],
            redispatched=self.samples.redispatched,
        )

    def set_phase(self, phase: FleetPhase.ValueType) -> None:
        """Asks all instances to give up the machine or take it back."""
        if phase != self.phase:
            self.phase = phase
            self._tell_all()

    def phase_reached(self, phase: FleetPhase.ValueType) -> bool:
        """Whether all instances of which something may run have confirmed a phase."""
        return all(life.heartbeat.phase == phase for life in self.registry.lives() if life.runs())

    def take_news(self) -> list[Life]:
        """Instances that `answer` has something new for since the last call."""
        news = [life for life in self.registry.lives() if life.has_news]
        for life in news:
            life.has_news = False
        return news

    def _tell_all(self) -> None:
        for life in self.registry.lives():
            life.has_news = True

    def _take_tokenizer_digest(self, digest: str) -> None:
        if digest == self._tokenizer_digest:
            return
        self._tokenizer_digest = digest
        for life in self.registry.lives():
            if not life.ended and life.request.tokenizer_digest != digest:
                self._end(life, "has another tokenizer than the trainer")

    def _end(self, life: Life, why: str) -> None:
        """Nothing is expected of it any more: what it had goes to others."""
        logger.info("%s %s: %d samples outstanding", life, why, len(life.samples))
        for sample in list(life.samples.values()):
            self.samples.release(sample, f"{life.name} {why}")
        life.end()

    def undeliverable(self, assignment: Assignment, reason: str) -> None:
        """Gives up the samples of an assignment that no record can carry; an answer that should go on begins anew."""
        for draw in assignment.draws:
            key = SampleKey(assignment.purpose, assignment.batch, assignment.group, draw.sample)
            if draw.HasField("prefix"):
                self.samples.begin_anew(key, reason)
            else:
                self.samples.give_up(key, reason)

    # Decisions.

    def advance(self, now: float) -> None:
        """Ends lives whose time is over, and admits what may start."""
        for life in self.registry.expired(now):
            self._end(life, "was given up" if life.stopped_at is None else "stopped")
        self._count_working()
        self._open_fleet(sum(life.takes_work(now) for life in self.registry.lives()), now)
        if self._takers(now):
            if self.samples.lengths.take_refresh():
                self._ahead = None
                self.samples.look_again()
            self.samples.admit(self.newest_weight_version, now)

    def draft(self, now: float) -> Draft | None:
        """Begins to dispatch what waits of one batch, that which starts first; one at a time, so that each is planned
        with what the others gave to whom.

        Returns:
            None: nothing waits, or nobody may have it yet.
        """
        lives = self._takers(now)
        ready = self.samples.take_ready() if lives else None
        if ready is None:
            return None
        batch, groups = ready
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.is_of(batch, groups, lives) and self.samples.comes_alone(batch):
            return ahead
        return self._dispatcher.draft(batch, groups, lives, self._trainer_pace)

    def draft_ahead(self, now: float) -> Draft | None:
        """Begins to plan the batch that waits for the next version, if instances will have nothing else to do then:
        `draft` will give it out, once planned, if it still holds.

        Returns:
            None: there is none, or it was planned before.
        """
        batch, lives = self.samples.next_waiting, self._takers(now)
        if batch is None or not lives:
            return None
        if self._ahead is not None and self._ahead.is_of(batch, batch.unplanned, lives):
            return None
        groups = self.samples.unplanned(batch, now)
        self._ahead = self._dispatcher.draft(batch, groups, lives, self._trainer_pace, alone=True) if groups else None
        return self._ahead

    def carry_out(self, draft: Draft, placings: Sequence[Placing], now: float) -> list[Outgoing]:
        """Assigns a part of what a draft has planned, as far as it still holds; the rest waits again.

        Returns:
            What to write, in this order.
        """
        return self._dispatcher.carry_out(draft.batch, placings, now)

    def balance(self, now: float) -> None:
        """Asks for samples that wait for a place while others have places. For when nothing is to be dispatched: that
        takes places too."""
        if self.settings.scheduler.moves != "none":
            lives_by_name = {life.name: life for life in self._takers(now)}
            for name, keys in unstarted_to_move(list(lives_by_name.values())).items():
                lives_by_name[name].ask_for(keys, Move())

    def _takers(self, now: float) -> list[Life]:
        """Whom work may be given to."""
        if not (self.fleet_open and self.reported and now >= self.old_leases_end_at):
            return []
        return [life for life in self.registry.lives() if life.takes_work(now)]

    def next_deadline(self, now: float) -> float | None:
        """When, after `now`, `advance` is due though nothing happens; None: never."""
        deadlines = [self.registry.next_expiry(), None if self.fleet_open else self._fleet_deadline()]
        if now < self.old_leases_end_at:
            deadlines.append(self.old_leases_end_at)
        deadlines.append(self.samples.lengths.next_deadline(now))
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _fleet_deadline(self) -> float | None:
        first = self.registry.first_registered_at
        return None if first is None else first + self.settings.scheduler.fleet_wait_s

    def _open_fleet(self, num_live: int, now: float) -> None:
        wanted, deadline = self.settings.generator.num_instances, self._fleet_deadline()
        if not self.fleet_open and (num_live >= wanted or (deadline is not None and now >= deadline)):
            self.fleet_open = True
            logger.info("%d of %d instances are live: dispatch may begin", num_live, wanted)

    def picture(self, now: float) -> Picture | None:
        """How the fleet stands, for a look at what should move; None: nothing could."""
        if self._nothing_moves():
            return None
        lives = [life for life in self.registry.lives() if life.takes_work(now)]
        if len(lives) < 2 or not any(life.samples for life in lives):
            return None
        in_flight = self.settings.weights.swap == "in_flight"
        return Picture(lives, move_running=self.settings.scheduler.moves == "running", over_versions=in_flight)

    def _nothing_moves(self) -> bool:
        return self.settings.scheduler.moves == "none" or self.phase == FLEET_PHASE_TRAIN

    def ask_for_moves(self, wishes: Iterable[Wish], now: float) -> int:
        """Asks for what a look has found, as far as it is still so.

        Returns:
            How many samples are asked for.
        """
        asked = 0
        for wish in wishes:
            source, target, sample = wish.source, wish.target, wish.source.samples.get(wish.key)
            if sample is None or sample.dispatch != wish.dispatch:
                continue
            free = wish.key not in source.moves and wish.key not in source.revokes
            if free and source.takes_work(now) and target.takes_work(now):
                source.ask_for([wish.key], Move(target, begun_too=wish.begun))
                asked += 1
        return asked
