"""The ledger as people see it: the fleet, the open batches, and sentences that say who waits for whom. Pure."""

from collections.abc import Iterator

from scheduler_svc.admission import batch_order, version_for
from scheduler_svc.batches import Batch, SampleState
from scheduler_svc.ledger import Ledger
from scheduler_svc.recall import RecallFigures
from scheduler_svc.registry import Life
from streamrl.v1.scheduler_pb2 import BatchState, GetFleetResponse, Instance, LengthRecall


def fleet_view(ledger: Ledger, now: float) -> GetFleetResponse:
    """Everything that GetFleet answers."""
    return GetFleetResponse(
        instances=[_instance(life, now) for life in ledger.registry.lives()],
        batches=[_batch_state(ledger, batch) for batch in _in_order(ledger)],
        newest_weight_version=ledger.newest_weight_version,
        waits=list(waits(ledger, now)),
        redispatched=ledger.samples.redispatched,
        moved=ledger.samples.moved,
        moved_tokens=ledger.samples.moved_tokens,
        cut=ledger.samples.cut,
        cut_tokens=ledger.samples.cut_tokens,
        dead_letters=ledger.dead_letters + ledger.registry.dead_letters,
        length_recall=_length_recall(ledger.samples.lengths.recall()),
    )


def _length_recall(figures: RecallFigures | None) -> LengthRecall | None:
    if figures is None:
        return None
    return LengthRecall(
        num_prompts=figures.num_prompts,
        longest_fifth=figures.of_fifth,
        longest_tenth=figures.of_tenth,
        longest_twentieth=figures.of_twentieth,
    )


def waits(ledger: Ledger, now: float) -> Iterator[str]:
    """Who waits for whom, a sentence each."""
    num_live = sum(life.takes_work(now) for life in ledger.registry.lives())
    if not ledger.fleet_open:
        yield f"{num_live} of {ledger.settings.generator.num_instances} instances registered"
    elif not num_live:
        yield "no instance is live"
    if now < ledger.old_leases_end_at:
        yield f"leases of an earlier scheduler may last for another {ledger.old_leases_end_at - now:.0f} s"
    if not ledger.reported:
        yield "the trainer has not reported to this scheduler yet"
    for life in ledger.registry.lives():
        if life.runs() and not life.heard_lately(now):
            yield f"{life.name} has been silent for {now - life.heard_at:.0f} s"
        if life.runs() and ledger.phase and life.heartbeat.phase not in (0, ledger.phase):
            yield f"{life.name} has not changed its phase yet"
    for batch in _in_order(ledger):
        yield from _batch_waits(ledger, batch)
    if not ledger.samples.batches:
        yield "all batches are over" if ledger.run_ended else "no prompts are here"


def _batch_waits(ledger: Ledger, batch: Batch) -> Iterator[str]:
    counts, of_all = batch.counts, f"of {batch.num_samples} samples"
    if not batch.whole:
        yield f"{batch.key} waits for prompts: {len(batch.groups)} of {batch.num_groups or 'an unknown number'}"
    elif _awaited_version(ledger, batch) is not None:
        yield f"{batch.key} waits for version {_awaited_version(ledger, batch)}"
    elif unassigned := counts[SampleState.UNASSIGNED]:
        yield f"{batch.key}: {unassigned} {of_all} wait for an instance"
    for name, outstanding in sorted(batch.outstanding_at.items()):
        if outstanding:
            yield f"{batch.key}: {outstanding} {of_all} outstanding at {name}"
    if batch.whole and not counts[SampleState.UNASSIGNED] + counts[SampleState.ASSIGNED]:
        yield f"{batch.key} waits for the trainer to close it"


def _awaited_version(ledger: Ledger, batch: Batch) -> int | None:
    required, newest = version_for(batch.key, ledger.settings.pipeline.max_staleness), ledger.newest_weight_version
    return required if not batch.admitted and (newest is None or newest < required) else None


def _in_order(ledger: Ledger) -> list[Batch]:
    max_staleness = ledger.settings.pipeline.max_staleness
    return sorted(ledger.samples.batches.values(), key=lambda batch: batch_order(batch.key, max_staleness))


def _batch_state(ledger: Ledger, batch: Batch) -> BatchState:
    return BatchState(
        purpose=batch.key.purpose,  # type: ignore[arg-type]
        batch=batch.key.batch,
        num_samples=batch.num_samples,
        accepted=batch.counts[SampleState.ACCEPTED],
        outstanding=batch.counts[SampleState.ASSIGNED],
        undispatched=batch.counts[SampleState.UNASSIGNED],
        waits_for_weight_version=_awaited_version(ledger, batch),
    )


def _instance(life: Life, now: float) -> Instance:
    return Instance(
        instance=life.name,
        site=life.request.site,
        address=life.request.address,
        pid=life.request.pid,
        incarnation=life.incarnation,
        partition=life.partition,
        state=life.state,
        heartbeat=life.heartbeat,
        outstanding=len(life.samples),
        heartbeat_age_s=now - life.heard_at,
    )
