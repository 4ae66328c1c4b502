"""Who gets what waits: plans become assignments. What it changes it changes by `SampleBook.assign` alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scheduler_svc.admission import priority, version_for
from scheduler_svc.batches import Batch, Sample
from scheduler_svc.observed_latency import fleet_profiles
from scheduler_svc.registry import Life
from scheduler_svc.samples import SampleBook
from scheduler_svc.settings import SchedulerSettings
from streamrl.identity import SampleKey, sample_seed
from streamrl.planning.dispatch import InstanceLoad, Piece, named_policy, plan
from streamrl.v1.records_pb2 import Assignment, SampleDraw


@dataclass(frozen=True, slots=True)
class Outgoing:
    """An assignment and the partition to write it to."""

    partition: int
    assignment: Assignment


class Dispatcher:
    """Gives samples that wait to instances that take work."""

    def __init__(self, settings: SchedulerSettings, samples: SampleBook) -> None:
        self._settings = settings
        self._samples = samples
        self._pins_training = settings.weights.one_version_per_batch
        self._orders_by_length = named_policy(settings.scheduler.dispatch).longest_first

    def dispatch(self, batch: Batch, groups: dict[int, list[Sample]], lives: list[Life]) -> list[Outgoing]:
        """All that waits of a batch.

        Args:
            groups: the samples, by group.
            lives: one or more.
        """
        return [*self._moved(batch, groups, lives), *self._anew(batch, groups, lives)]

    def _moved(self, batch: Batch, groups: dict[int, list[Sample]], lives: list[Life]) -> Iterator[Outgoing]:
        """Gives samples that were taken back for a certain instance to that one, and takes them out of `groups`."""
        for index, samples in groups.items():
            groups[index] = []
            for sample in samples:
                life = sample.moves_to
                if life is None or life not in lives:
                    groups[index].append(sample)
                else:
                    yield Outgoing(life.partition, self._assign(batch, self._piece(batch, index, [sample]), life))

    def _anew(self, batch: Batch, groups: dict[int, list[Sample]], lives: list[Life]) -> list[Outgoing]:
        """Plans what waits of one batch over the instances that take work."""
        if not any(groups.values()):
            return []
        # An instance may repeat that it has given a sample back: it must not mean a later dispatch to itself.
        left = {id(sample.moved_from) for samples in groups.values() for sample in samples if sample.moved_from}
        if left:
            others = [life for life in lives if id(life) not in left]
            lives = [life for life in others if life.room] or others or lives
        pieces = []
        for index, samples in groups.items():
            # Each answer that goes on has a record of its own: they may be long.
            pieces += [self._piece(batch, index, [sample]) for sample in samples if sample.prefix is not None]
            if anew := [sample for sample in samples if sample.prefix is None]:
                pieces.append(self._piece(batch, index, anew))
        lengths, profiles = self._samples.lengths, fleet_profiles(lives)
        shares = plan(
            self._settings.scheduler.dispatch,
            pieces,
            [
                InstanceLoad(life.name, life.request.max_running, life.outstanding_tokens, profiles.get(life.name))
                for life in lives
            ],
            length_p50=lengths.history.recent_quantile(0.5),
            length_p90=lengths.history.recent_quantile(0.9),
            seed=sample_seed(self._settings.run.seed, SampleKey(*batch.key, 0, 0)),
        )
        return [
            Outgoing(life.partition, self._assign(batch, piece, life))
            for life in lives
            for piece in shares.get(life.name, ())
        ]

    def _piece(self, batch: Batch, index: int, samples: Sequence[Sample]) -> Piece:
        """Samples of a group, as a plan takes them."""
        group, lengths = batch.groups[index], self._samples.lengths
        if group.foretold is None:
            group.foretold = lengths.foretell(group.prompt)
        prompt_id, max_tokens = group.prompt.prompt_id, group.prompt.sampling.max_tokens
        group.lengths = lengths.forecast(prompt_id, max_tokens)
        there = max(sample.tokens_there for sample in samples)
        return Piece(
            index,
            tuple(sample.key.sample for sample in samples),
            min(max(lengths.expected_tokens(prompt_id, max_tokens), there + 1), max_tokens),
            lengths=group.lengths,
            prompt_tokens=len(group.prompt.token_ids) + there,
        )

    def _assign(self, batch: Batch, piece: Piece, life: Life) -> Assignment:
        group, max_staleness = batch.groups[piece.group], self._settings.pipeline.max_staleness
        weight_version = least_version = version_for(batch.key, max_staleness)
        draws = []
        for index in piece.samples:
            sample = group.samples[index]
            self._samples.assign(sample, life, piece.expected_tokens)
            seed = sample_seed(self._settings.run.seed, sample.key, sample.tokens_there)
            draws.append(SampleDraw(sample=index, seed=seed, dispatch=sample.dispatch, prefix=sample.prefix))
            if sample.prefix is not None:
                # Versions of an answer never fall.
                least_version = max(least_version, sample.prefix.version_spans[-1].weight_version)
        return Assignment(
            attempt=self._settings.run.attempt,
            incarnation=life.incarnation,
            purpose=group.prompt.purpose,
            batch=batch.key.batch,
            group=piece.group,
            prompt_id=group.prompt.prompt_id,
            token_ids=group.prompt.token_ids,
            sampling=group.prompt.sampling,
            draws=draws,
            min_weight_version=least_version,
            exact_weight_version=weight_version if batch.key.is_evaluation or self._pins_training else None,
            priority=priority(batch.key, max_staleness, piece.expected_tokens if self._orders_by_length else 0),
        )
