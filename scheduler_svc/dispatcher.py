"""Who gets what waits: plans become assignments. What it changes it changes by `SampleBook.assign` alone.

A dispatch has three steps: what is known of a batch is noted in parts on the loop that owns the ledger (`Draft.parts`),
planned in a thread (`Draft.plan`), and carried out in parts on the loop again (`Dispatcher.carry_out`), as far as it
holds by then. So heartbeats and calls are answered in between, however large the batch and the fleet are.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from scheduler_svc.admission import priority, version_for
from scheduler_svc.batches import Batch, Sample, SampleState
from scheduler_svc.lengths import LengthEstimates
from scheduler_svc.observed_latency import fleet_profiles
from scheduler_svc.registry import Life
from scheduler_svc.samples import SampleBook
from scheduler_svc.settings import SchedulerSettings
from streamrl.identity import SampleKey, sample_seed
from streamrl.planning.dispatch import InstanceLoad, Piece, named_policy, plan
from streamrl.planning.iteration import TrainerPace
from streamrl.v1.records_pb2 import Assignment, SampleDraw

_PART = 250
"""Groups or pieces that are dealt with at once: about 10 ms."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """An assignment and the partition to write it to."""

    partition: int
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Placing:
    """Samples of one group, and who is to draw them."""

    piece: Piece
    life: Life


class Draft:
    """The dispatch of samples of one batch that wait. They wait in no other draft, and nowhere else, until they are
    placed."""

    def __init__(
        self,
        batch: Batch,
        groups: Mapping[int, Sequence[Sample]],
        lives: Sequence[Life],
        lengths: LengthEstimates,
        *,
        policy: str,
        trainer_pace: TrainerPace | None,
        alone: bool,
        seed: int,
    ) -> None:
        """
        Args:
            groups: the samples, by group.
            lives: one or more.
            trainer_pace: as for `plan`.
            alone: whether what instances have will be over when this is given out.
            seed: of policies that draw.
        """
        self.batch = batch
        self._groups = groups
        self._lives = lives
        self._lengths = lengths
        self._policy = policy
        self._trainer_pace = trainer_pace
        self._alone = alone
        self._seed = seed
        self._placed: list[Placing] = []
        """Samples that were taken back for a certain instance."""
        self._pieces: list[Piece] = []
        self._moved_from: set[Life] = set()
        self._places: dict[str, Life] = {}
        self._loads: list[InstanceLoad] = []
        self._length_p50: float | None = None
        self._length_p90: float | None = None
        self._found: list[list[Placing]] | None = None

    def is_of(self, batch: Batch, groups: Collection[int], lives: Sequence[Life]) -> bool:
        """Whether it is, or will be, the plan for these groups and instances."""
        return (
            self.batch is batch
            and self._lives == lives
            and len(self._groups) == len(groups)
            and all(group in self._groups for group in groups)
        )

    def parts(self) -> Iterator[None]:
        """Notes what is known of samples and instances, a part with each step. Nothing, once it is planned."""
        if self._found is not None:
            return
        for number, (index, samples) in enumerate(self._groups.items(), start=1):
            # Outcomes may have come while they waited.
            waiting = [sample for sample in samples if sample.state is SampleState.UNASSIGNED]
            self._note(index, sorted(waiting, key=lambda sample: sample.key))
            if number % _PART == 0:
                yield
        # An instance may repeat that it has given a sample back: it must not mean a later dispatch to itself.
        others = [life for life in self._lives if life not in self._moved_from]
        lives = others or self._lives
        if self._moved_from:
            lives = [life for life in others if life.room] or lives
        self._places = {life.name: life for life in lives}
        profiles = fleet_profiles(lives)
        self._loads = [
            InstanceLoad(
                life.name,
                life.request.max_running,
                0 if self._alone else life.outstanding_tokens,
                profiles.get(life.name),
            )
            for life in lives
        ]
        history = self._lengths.history
        self._length_p50, self._length_p90 = history.recent_quantile(0.5), history.recent_quantile(0.9)

    def _note(self, index: int, samples: Sequence[Sample]) -> None:
        anew = []
        for sample in samples:
            if sample.moves_to is not None and sample.moves_to in self._lives:
                self._placed.append(Placing(self._piece(index, [sample]), sample.moves_to))
                continue
            if sample.moved_from is not None:
                self._moved_from.add(sample.moved_from)
            if sample.prefix is not None:
                # Each answer that goes on has a record of its own: they may be long.
                self._pieces.append(self._piece(index, [sample]))
            else:
                anew.append(sample)
        if anew:
            self._pieces.append(self._piece(index, anew))

    def _piece(self, index: int, samples: Sequence[Sample]) -> Piece:
        """Samples of a group, as a plan takes them."""
        group, lengths = self.batch.groups[index], self._lengths
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

    def plan(self) -> list[list[Placing]]:
        """Who should draw what, for `Dispatcher.carry_out`, in parts. It is planned once. For a thread."""
        if self._found is None:
            self._found = self._plan()
        return self._found

    def _plan(self) -> list[list[Placing]]:
        placed = list(self._placed)
        if self._pieces:
            shares = plan(
                self._policy,
                self._pieces,
                self._loads,
                length_p50=self._length_p50,
                length_p90=self._length_p90,
                trainer_pace=self._trainer_pace,
                seed=self._seed,
            )
            placed += [Placing(piece, life) for name, life in self._places.items() for piece in shares.get(name, ())]
        return [placed[start : start + _PART] for start in range(0, len(placed), _PART)]


class Dispatcher:
    """Gives samples that wait to instances that take work."""

    def __init__(self, settings: SchedulerSettings, samples: SampleBook) -> None:
        self._settings = settings
        self._samples = samples
        self._pins_training = settings.weights.one_version_per_batch
        self._waits_for_trainer = settings.pipeline.max_staleness == 0
        self._orders_by_length = named_policy(settings.scheduler.dispatch).longest_first

    def draft(
        self,
        batch: Batch,
        groups: Mapping[int, Sequence[Sample]],
        lives: Sequence[Life],
        trainer_pace: TrainerPace | None,
        *,
        alone: bool = False,
    ) -> Draft:
        """Begins the dispatch of all that waits of a batch.

        Args:
            groups, lives, alone: as for `Draft`.
            trainer_pace: None: it is not known.
        """
        counts = self._waits_for_trainer and not batch.key.is_evaluation
        return Draft(
            batch,
            groups,
            lives,
            self._samples.lengths,
            policy=self._settings.scheduler.dispatch,
            trainer_pace=trainer_pace if counts else None,
            alone=alone,
            seed=sample_seed(self._settings.run.seed, SampleKey(*batch.key, 0, 0)),
        )

    def carry_out(self, batch: Batch, placings: Sequence[Placing], now: float) -> list[Outgoing]:
        """Assigns what of a plan still holds: samples that are not wanted any more are left out, and those of an
        instance that does not take work any more wait again.

        Args:
            placings: a part of what `Draft.plan` has found, each part once.
        """
        outgoing = []
        for placing in placings:
            piece, life = placing.piece, placing.life
            samples = self._samples.still_waiting(batch, piece.group, piece.samples)
            if not life.takes_work(now):
                self._samples.wait_again(samples)
            elif samples:
                indices = tuple(sample.key.sample for sample in samples)
                outgoing.append(Outgoing(life.partition, self._assign(batch, replace(piece, samples=indices), life)))
        return outgoing

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
