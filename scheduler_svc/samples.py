"""Where every sample of every open batch stands, and whose it is. Pure state.

What holds whatever happens:
* A sample has one owner at most, and leaves it only by `_take_from_owner`.
* One that waits for an instance waits in one place: with those that are ready, or in the draft that took it from them.
* It ends accepted, dropped, or abandoned after `max_dispatches`, and stays wanted until then.
* Whatever is said twice changes nothing.

When a sample may leave a silent instance is decided in scheduler_svc/registry.py, where it goes next in
scheduler_svc/dispatcher.py.
"""

import heapq
import logging
from collections.abc import Iterable, Sequence

from scheduler_svc.admission import batch_order, version_for
from scheduler_svc.batches import Batch, Group, Sample, SampleState, batch_key, check_prompt
from scheduler_svc.lengths import LengthEstimates
from scheduler_svc.registry import Life
from streamrl.errors import RecordError
from streamrl.identity import PURPOSE_TRAIN, BatchKey, SampleKey
from streamrl.v1.records_pb2 import BatchEnd, Prompt
from streamrl.v1.sample_pb2 import AnswerPrefix
from streamrl.v1.scheduler_pb2 import OUTCOME_ACCEPTED, OUTCOME_DROPPED, OUTCOME_REJECTED, SampleOutcome

logger = logging.getLogger(__name__)


class SampleBook:
    """The open batches and their samples."""

    def __init__(self, *, max_dispatches: int, max_staleness: int, lengths: LengthEstimates) -> None:
        self._max_dispatches = max_dispatches
        self._max_staleness = max_staleness
        self.batches: dict[BatchKey, Batch] = {}
        """Those that are not closed."""
        self.closed: set[BatchKey] = set()
        self.lengths = lengths
        self.redispatched = 0
        """Train samples given to an instance a second or later time."""
        self.moved = 0
        """Answers that were given back after they had begun, to go on elsewhere."""
        self.moved_tokens = 0
        """Tokens that they had."""
        self.cut = 0
        """Samples that ran when the trainer dropped them."""
        self.cut_tokens = 0
        """Tokens that they had, as of the last heartbeat before."""
        self._early: dict[BatchKey, dict[SampleKey, SampleOutcome]] = {}
        """Outcomes of samples whose prompts have not been read yet."""
        self._to_admit: list[tuple[tuple[int, bool, int], BatchKey]] = []
        """A heap of batches that are whole, by the order in which they start."""
        self._ready: dict[BatchKey, dict[int, list[Sample]]] = {}
        """Admitted samples that wait for an instance, by group."""

    # Prompts.

    def take_prompt(self, prompt: Prompt) -> None:
        """
        Raises:
            RecordError: it makes no sense, or contradicts an earlier one.
        """
        key = batch_key(prompt)
        check_prompt(prompt)
        if key in self.closed:
            return
        batch = self.batches.setdefault(key, Batch(key))
        group = batch.add(prompt)
        if group is None:
            return
        self.lengths.take_prompt(prompt)
        if early := self._early.get(key):
            for sample in group.samples:
                if outcome := early.pop(sample.key, None):
                    self._resolve(batch, group, sample, outcome)
        self._queue(batch)

    def take_batch_end(self, end: BatchEnd) -> None:
        """
        Raises:
            RecordError: it makes no sense.
        """
        key = batch_key(end)
        if end.num_groups < 1:
            raise RecordError(f"num_groups is {end.num_groups}: expected 1 or more")
        if key not in self.closed:
            batch = self.batches.setdefault(key, Batch(key))
            batch.end(end)
            self._queue(batch)

    def _queue(self, batch: Batch) -> None:
        if batch.whole and batch.unplanned:
            heapq.heappush(self._to_admit, (batch_order(batch.key, self._max_staleness), batch.key))

    # Outcomes.

    def take_outcome(self, outcome: SampleOutcome) -> None:
        """
        Raises:
            ValueError: the outcome is unknown.
        """
        if outcome.outcome not in (OUTCOME_ACCEPTED, OUTCOME_REJECTED, OUTCOME_DROPPED):
            raise ValueError(f"outcome {outcome.outcome} is unknown")
        key = SampleKey.from_proto(outcome.id)
        if key.batch_key in self.closed:
            return
        batch = self.batches.get(key.batch_key)
        sample = batch.sample(key) if batch is not None else None
        if batch is not None and sample is not None:
            self._resolve(batch, batch.groups[key.group], sample, outcome)
        elif outcome.outcome != OUTCOME_REJECTED:
            self._early.setdefault(key.batch_key, {})[key] = outcome

    def _resolve(self, batch: Batch, group: Group, sample: Sample, outcome: SampleOutcome) -> None:
        if sample.state is SampleState.ACCEPTED:
            return
        if outcome.outcome == OUTCOME_REJECTED:
            if sample.owner is not None and _is_of_present_dispatch(outcome, sample, sample.owner):
                # What was wrong may be in the tokens that it went on from.
                sample.prefix = None
                self.release(sample, f"rejected: {outcome.reason or 'no reason given'}")
            return
        accepted = outcome.outcome == OUTCOME_ACCEPTED
        if sample.owner is not None:
            # An only owner made what was accepted. A later one may still be at work on what an earlier one has sent.
            if sample.dispatch > 1 or not accepted:
                sample.owner.revoke(sample.key)
            if not accepted and (num_tokens := sample.owner.tokens_there.get(sample.key, 0)):
                self.cut += 1
                self.cut_tokens += num_tokens
                # It would have been longer: what is known of lengths must not forget the longest answers.
                group.answers.append((num_tokens, True))
            self._take_from_owner(batch, sample)
        batch.abandoned.pop(sample.key, None)
        sample.prefix = None
        batch.move(sample, SampleState.ACCEPTED if accepted else SampleState.DROPPED)
        if accepted and outcome.num_tokens > 0:
            group.answers.append((outcome.num_tokens, outcome.truncated))
            self.lengths.history.observe(group.prompt.prompt_id, batch.key.batch, outcome.num_tokens)

    def close(self, key: BatchKey) -> None:
        """Forgets a batch; what is still at work on it is told to stop."""
        self.closed.add(key)
        self._early.pop(key, None)
        self._ready.pop(key, None)
        batch = self.batches.pop(key, None)
        if batch is None:
            return
        for group in batch.groups.values():
            for sample in group.samples:
                if sample.owner is not None:
                    sample.owner.revoke(sample.key)
                    self._take_from_owner(batch, sample)
            if group.answers and not key.is_evaluation:
                self.lengths.take_answers(group.prompt, key.batch, group.answers, group.foretold)

    # Ownership.

    @property
    def any_assigned(self) -> bool:
        """Whether any instance has a sample."""
        return any(batch.counts[SampleState.ASSIGNED] for batch in self.batches.values())

    def assign(self, sample: Sample, life: Life, expected_tokens: int) -> None:
        """Gives an unassigned sample to an instance."""
        assert sample.state is SampleState.UNASSIGNED, f"sample {sample.key} is {sample.state.name}"
        batch = self.batches[sample.key.batch_key]
        sample.owner = life
        sample.dispatch += 1
        sample.attempts_used += 1
        sample.expected_tokens = expected_tokens
        sample.moved_from = sample.moves_to = None
        life.samples[sample.key] = sample
        life.outstanding_tokens += expected_tokens
        batch.outstanding_at[life.name] += 1
        batch.move(sample, SampleState.ASSIGNED)
        if sample.dispatch > 1 and batch.key.purpose == PURPOSE_TRAIN:
            self.redispatched += 1

    def hand_over(self, sample: Sample, prefix: AnswerPrefix) -> None:
        """Notes what its owner has drawn of an answer that it gives back, if anything can be made of it."""
        spans = sum(span.num_tokens for span in prefix.version_spans)
        if len(prefix.token_ids) > sample.tokens_there and len(prefix.token_ids) == len(prefix.logprobs) == spans:
            sample.prefix = prefix
            self.moved += 1
            self.moved_tokens += spans

    def release(self, sample: Sample, reason: str, *, given_back: bool = False) -> None:
        """Takes a sample from its owner, to be dispatched again or given up.

        Args:
            reason: ends the sentence "dispatched 3 times, the last time ...".
            given_back: in order, so that it is not the sample's fault.
        """
        batch = self.batches[sample.key.batch_key]
        self._take_from_owner(batch, sample)
        if given_back:
            sample.attempts_used -= 1
        if sample.attempts_used >= self._max_dispatches:
            self._abandon(batch, sample, f"dispatched {sample.dispatch} times, the last time {reason}")
        else:
            batch.move(sample, SampleState.UNASSIGNED)
            self.wait_again([sample])

    def give_up(self, key: SampleKey, reason: str) -> None:
        """Abandons an assigned sample, whatever number of dispatches it had."""
        batch = self.batches.get(key.batch_key)
        sample = batch.sample(key) if batch is not None else None
        if batch is not None and sample is not None and sample.owner is not None:
            self._take_from_owner(batch, sample)
            self._abandon(batch, sample, reason)

    def begin_anew(self, key: SampleKey, reason: str) -> None:
        """An assigned sample, whose answer should have gone on, is dispatched again without what is there."""
        batch = self.batches.get(key.batch_key)
        sample = batch.sample(key) if batch is not None else None
        if sample is not None and sample.owner is not None:
            logger.warning("the answer to sample %s begins anew: %s", key, reason)
            sample.prefix = None
            self.release(sample, reason, given_back=True)

    def _take_from_owner(self, batch: Batch, sample: Sample) -> None:
        life = sample.owner
        assert life is not None
        del life.samples[sample.key]
        life.begun.discard(sample.key)
        life.moves.pop(sample.key, None)
        life.outstanding_tokens -= sample.expected_tokens
        batch.outstanding_at[life.name] -= 1
        sample.owner = None

    def _abandon(self, batch: Batch, sample: Sample, reason: str) -> None:
        logger.warning("sample %s is given up: %s", sample.key, reason)
        batch.move(sample, SampleState.ABANDONED)
        batch.abandoned[sample.key] = reason

    # What waits.

    def look_again(self) -> None:
        """Has the lengths of all that waits to be admitted estimated anew."""
        for batch in self.batches.values():
            for index in batch.unplanned:
                self.lengths.take_prompt(batch.groups[index].prompt)

    def admit(self, newest_weight_version: int | None, now: float) -> None:
        """Makes ready what may start with a version. A batch waits a moment for estimates that are about to come."""
        while self._to_admit and newest_weight_version is not None:
            (required, _, _), key = self._to_admit[0]
            if required > newest_weight_version:
                return
            batch = self.batches.get(key)
            if batch is not None and self._awaits_lengths(batch, now):
                return
            heapq.heappop(self._to_admit)
            if batch is None or not batch.whole or not batch.unplanned:
                continue
            ready = self._ready.setdefault(key, {})
            for index in batch.unplanned:
                ready.setdefault(index, []).extend(batch.groups[index].samples)
            logger.info("%s is admitted: %d groups, version %d", key, len(batch.unplanned), newest_weight_version)
            batch.unplanned.clear()
            batch.admitted = True

    @property
    def next_waiting(self) -> Batch | None:
        """The batch that is admitted next, if instances will have nothing else to do then; None: they will, or none
        waits."""
        if not self._to_admit or self._ready:
            return None
        batch = self.batches.get(self._to_admit[0][1])
        return batch if batch is not None and batch.whole and batch.unplanned and self.comes_alone(batch) else None

    def comes_alone(self, batch: Batch) -> bool:
        """Whether nothing that instances have is left when a batch has its version: what was trained for that is over,
        though the trainer may not have said so yet."""
        version = version_for(batch.key, self._max_staleness)
        return not any(
            other.counts[SampleState.ASSIGNED]
            for key, other in self.batches.items()
            if key.is_evaluation or key.batch >= version
        )

    def unplanned(self, batch: Batch, now: float) -> dict[int, list[Sample]]:
        """The samples of a batch that were not admitted, by group; none while estimates are about to come."""
        if self._awaits_lengths(batch, now):
            return {}
        return {index: list(batch.groups[index].samples) for index in batch.unplanned}

    def _awaits_lengths(self, batch: Batch, now: float) -> bool:
        return any(self.lengths.awaits(batch.groups[index].prompt.prompt_id, now) for index in batch.unplanned)

    def take_ready(self) -> tuple[Batch, dict[int, list[Sample]]] | None:
        """The samples that wait for an instance, by group, of the batch that starts first; None: none do. The caller
        assigns them or has them `wait_again`; some may have been resolved meanwhile."""
        if not self._ready:
            return None
        key = min(self._ready, key=lambda key: batch_order(key, self._max_staleness))
        return self.batches[key], self._ready.pop(key)

    def still_waiting(self, batch: Batch, group: int, indices: Sequence[int]) -> list[Sample]:
        """Those of some samples of a group that still have to be given to an instance."""
        if self.batches.get(batch.key) is not batch:
            return []
        samples = batch.groups[group].samples
        return [samples[index] for index in indices if samples[index].state is SampleState.UNASSIGNED]

    def wait_again(self, samples: Iterable[Sample]) -> None:
        """Puts back what was taken with `take_ready` and is `still_waiting`."""
        for sample in samples:
            self._ready.setdefault(sample.key.batch_key, {}).setdefault(sample.key.group, []).append(sample)


def _is_of_present_dispatch(outcome: SampleOutcome, sample: Sample, owner: Life) -> bool:
    """A rejection that comes twice, or of a copy from an earlier owner, says nothing about the present one's."""
    return outcome.incarnation in (0, owner.incarnation) and outcome.dispatch in (0, sample.dispatch)
