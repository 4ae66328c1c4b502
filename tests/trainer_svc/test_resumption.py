"""What an attempt begins with, and that what it takes from a topic makes no difference to what is trained."""

import random
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import StaleAttemptError
from streamrl.identity import PURPOSE_TRAIN, BatchKey, SampleKey
from streamrl.kafka.reader import Record
from streamrl.v1.records_pb2 import ROLLOUT_STATUS_OK, Rollout
from streamrl.v1.sample_pb2 import FINISH_REASON_STOP, LOGPROB_MODE_PROCESSED, VersionSpan
from trainer_svc.acceptance import Acceptance, Verdict
from trainer_svc.ancestry import INITIAL_MODEL, Origin, read_origins, shared_version
from trainer_svc.collector import Collector
from trainer_svc.groups import AcceptanceRules
from trainer_svc.resumption import begin, keep_tracker_run, newest_checkpoint, tracker_run
from trainer_svc.rewards import RewardScore
from trainer_svc.settings import TrainerSettings

PROMPTS, SAMPLES, STALENESS = 2, 2, 1


def scored(reward: float) -> "Future[RewardScore]":
    future: Future[RewardScore] = Future()
    future.set_result(RewardScore(reward, {}))
    return future


@dataclass(frozen=True)
class SomePrompt:
    token_ids: tuple[int, ...] = (1, 2)


@dataclass(frozen=True)
class Prompts:
    """As much of a prompt set as is looked at."""

    size: int = 5
    digest: str = "d"

    def __len__(self) -> int:
        return self.size


def _settings(tmp_path: Path, attempt: int = 1, **trainer: Any) -> TrainerSettings:
    (tmp_path / "r").mkdir(exist_ok=True)
    return TrainerSettings(run={"id": "r", "dir": tmp_path, "attempt": attempt}, trainer=trainer)  # type: ignore[arg-type]


def _save(settings: TrainerSettings, iteration: int, **changes: Any) -> Path:
    """A checkpoint of the present attempt, with no weights in it."""
    from trainer_svc.checkpoint import save_checkpoint
    from trainer_svc.ranks import Ranks

    class NoPolicy:
        def save(self, folder: Path) -> None: ...

        def load(self, folder: Path) -> None: ...

    prompts: Any = Prompts()
    state, _ = begin(settings, prompts, newest_checkpoint(settings))
    state.lineage.iteration = iteration
    state = replace(state, attempt=settings.run.attempt, **changes)
    return save_checkpoint(
        settings.run.folder / "checkpoints",
        attempt=settings.run.attempt,
        iteration=iteration,
        saved=NoPolicy(),
        state=state.to_json(),
        keep=9,
        ranks=Ranks(0, 1),
    )


def test_the_first_attempt_begins_with_the_initial_model(tmp_path: Path) -> None:
    settings, prompts = _settings(tmp_path), Prompts()
    assert newest_checkpoint(settings) is None
    state, _ = begin(settings, prompts, None)  # type: ignore[arg-type]
    assert (state.lineage.iteration, list(state.open_evaluations), state.data_digest) == (0, [0], "d")
    assert read_origins(settings.run.folder / "lineage.json") == {1: INITIAL_MODEL}


def test_an_attempt_continues_the_newest_checkpoint(tmp_path: Path) -> None:
    _save(_settings(tmp_path, 1), 4, wall_s=2.5)
    settings, prompts = _settings(tmp_path, 2), Prompts()
    state, shared = begin(settings, prompts, newest_checkpoint(settings))  # type: ignore[arg-type]
    assert (state.lineage.iteration, state.wall_s) == (4, 2.5)
    assert shared(1) == 4
    assert read_origins(settings.run.folder / "lineage.json") == {1: INITIAL_MODEL, 2: Origin(1, 4)}


def test_a_process_of_a_life_that_is_over_continues_nothing(tmp_path: Path) -> None:
    _save(_settings(tmp_path, 1), 2)
    _save(_settings(tmp_path, 2), 3)
    for attempt in (1, 2):
        with pytest.raises(StaleAttemptError, match="attempt-0002-iteration-000003 is of attempt 2"):
            newest_checkpoint(_settings(tmp_path, attempt))


@pytest.mark.parametrize(
    ("prompts", "trainer", "message"),
    [
        (Prompts(digest="other"), {}, "other prompts than when the checkpoint was made"),
        (Prompts(size=6), {}, "the data set has 6 prompts and the checkpoint was made with 5"),
        (Prompts(), {"num_iterations": 3}, "the checkpoint has 4 iterations behind it"),
    ],
)
def test_what_does_not_fit_the_checkpoint_is_refused(
    tmp_path: Path, prompts: Any, trainer: dict[str, Any], message: str
) -> None:
    _save(_settings(tmp_path, 1), 4)
    settings = _settings(tmp_path, 2, **trainer)
    with pytest.raises(ValueError, match=message):
        begin(settings, prompts, newest_checkpoint(settings))


def test_the_trackers_run_is_known_before_there_is_a_checkpoint(tmp_path: Path) -> None:
    settings, prompts = _settings(tmp_path), Prompts()
    state, _ = begin(settings, prompts, None)  # type: ignore[arg-type]
    assert tracker_run(settings, state) == ""
    keep_tracker_run(settings, "abc")
    assert tracker_run(settings, state) == "abc"
    (settings.run.folder / "tracker.json").unlink()
    assert tracker_run(settings, replace(state, tracker_run_id="def")) == "def"


class World:
    """A topic, and a run that trains on it, dies, and is taken up again, with a checkpoint now and then.

    The answer to a sample is made from its identity and the weights that draw it; the weights are the sums of what was
    trained. So two runs that train the same samples, drawn from the same weights, end with the same weights.
    """

    def __init__(self, num_batches: int, max_refills: int, choose: random.Random) -> None:
        self.num_batches = num_batches
        self.max_refills = max_refills
        self.choose = choose
        self.topic: list[Rollout] = []
        self.origins: dict[int, Origin] = {}
        self.weights: dict[tuple[int, int], int] = {(0, 0): 7}
        """By attempt that made it and version."""
        self.checkpoints: list[tuple[int, int, int, int]] = [(0, 0, 0, 7)]
        """Attempt, iteration, position, weights."""
        self.trained: dict[int, list[tuple[Any, ...]]] = {}
        self.generated: list[tuple[SampleKey, int]] = []
        self.reused = 0

    def attempt(self, number: int, *, dies_at: int, every: int) -> bool:
        """One life, which ends after so many records; returns whether the run is complete."""
        made_by, iteration, position, weights = self.checkpoints[-1]
        self.origins[number] = Origin(made_by, iteration)
        line = {iteration: weights}
        acceptance = Acceptance(
            AcceptanceRules(attempt=number, max_staleness=STALENESS, max_refills=self.max_refills),
            shared_version=lambda earlier: shared_version(self.origins, earlier, number),
        )
        collector = Collector(
            acceptance,
            score=lambda _prompt, token_ids, _truncated: scored(float(token_ids[0] % 2)),
            report=lambda _outcome: None,
            dead_letter=lambda _record, _reason: None,
            refill=lambda key: collector.extend(key, SomePrompt()),
        )
        collector.begin({0: position}, {0: len(self.topic)})
        opened = iteration

        def open_ahead() -> None:
            nonlocal opened
            while opened < min(iteration + STALENESS + 1, self.num_batches):
                collector.open(BatchKey(PURPOSE_TRAIN, opened), [SomePrompt()] * PROMPTS, SAMPLES)
                opened += 1

        open_ahead()
        for offset in range(position, len(self.topic)):
            collector.on_records([Record("rollouts", 0, offset, None, self.topic[offset].SerializeToString())])
        self.reused += acceptance.reused
        records_left = dies_at
        while iteration < self.num_batches:
            # What is written may ask for more.
            while missing := _missing(acceptance):
                self.choose.shuffle(missing)
                for key in missing:
                    if records_left == 0:
                        return False
                    records_left -= 1
                    version = self.choose.choice([v for v in line if key.batch - STALENESS <= v <= key.batch])
                    self._write(collector, number, key, version, line[version])
            batch = collector.close(BatchKey(PURPOSE_TRAIN, iteration))
            trained = sorted((sample.identity, tuple(sample.answer_token_ids)) for sample in batch.trained)
            self.trained[iteration] = trained
            assert batch.counts.received == batch.counts.expected
            assert batch.counts.expected == SAMPLES * (PROMPTS + batch.num_refills)
            assert batch.counts.trained == PROMPTS * SAMPLES or batch.num_refills == self.max_refills > 0
            assert batch.trained_staleness_max <= STALENESS
            weights = weights * 31 + sum(tokens[0] for _, tokens in trained)
            iteration += 1
            line[iteration] = weights
            open_ahead()
            if iteration % every == 0:
                self.checkpoints.append((number, iteration, collector.resume_positions()[0], weights))
        return True

    def _write(self, collector: Collector, attempt: int, key: SampleKey, version: int, weights: int) -> None:
        rollout = Rollout(
            attempt=attempt,
            id=key.to_proto(),
            # The weights stand in the answer, so that a test sees which ones drew it.
            token_ids=[hash((tuple(key), weights)) % 1000, weights % 1_000_003],
            logprobs=[-1.0, -1.0],
            logprob_mode=LOGPROB_MODE_PROCESSED,
            version_spans=[VersionSpan(weight_version=version, num_tokens=2)],
            status=ROLLOUT_STATUS_OK,
            finish_reason=FINISH_REASON_STOP,
        )
        self.generated.append((key, attempt))
        for _ in range(self.choose.choice([1, 1, 1, 2])):
            self.topic.append(rollout)
            collector.on_records([Record("rollouts", 0, len(self.topic) - 1, None, rollout.SerializeToString())])


def _missing(acceptance: Acceptance) -> list[SampleKey]:
    return [
        key
        for batch in acceptance.open_batches()
        for group in range(len(acceptance.batch(batch).prompts))
        for sample in range(SAMPLES)
        if (key := SampleKey(*batch, group, sample)) not in acceptance.batch(batch).outcomes
    ]


@given(
    st.integers(1, 5),
    st.lists(st.integers(0, 14), max_size=4),
    st.integers(1, 3),
    st.sampled_from([0, 0, 3]),
    st.integers(0, 2**32),
)
def test_a_run_that_dies_and_is_taken_up_trains_every_sample_once_on_answers_of_its_own_line(
    num_batches: int, deaths: list[int], every: int, max_refills: int, seed: int
) -> None:
    world = World(num_batches, max_refills, random.Random(seed))
    attempt = 0
    for attempt, dies_at in enumerate(deaths, start=1):
        if world.attempt(attempt, dies_at=dies_at, every=every):
            break
    else:
        assert world.attempt(len(deaths) + 1, dies_at=-1, every=every)
        attempt = len(deaths) + 1
    assert sorted(world.trained) == list(range(num_batches))
    line = _final_line(world)
    for batch, trained in world.trained.items():
        identities = [identity for identity, _ in trained]
        groups = sorted({group for _, group, _ in identities}) if max_refills else range(PROMPTS)
        assert identities == [(batch, group, sample) for group in groups for sample in range(SAMPLES)]
        # Every answer was drawn from weights of the final line, none from a version that was forgotten.
        allowed = {line[version] % 1_000_003 for version in range(max(0, batch - STALENESS), batch + 1)}
        assert {tokens[1] for _, tokens in trained} <= allowed
    _assert_nothing_valid_was_generated_again(world)


def _final_line(world: World) -> dict[int, int]:
    """The weights of each version, computed anew from what was trained."""
    weights = 7
    line = {0: weights}
    for batch in sorted(world.trained):
        weights = weights * 31 + sum(tokens[0] for _, tokens in world.trained[batch])
        line[batch + 1] = weights
    return line


def _assert_nothing_valid_was_generated_again(world: World) -> None:
    """A later attempt generates a sample only if what an earlier one had written of it is not of its line."""
    first: dict[SampleKey, Rollout] = {}
    for rollout in world.topic:
        key = SampleKey.from_proto(rollout.id)
        earlier = first.get(key)
        if earlier is not None and earlier.attempt < rollout.attempt:
            shared = shared_version(world.origins, earlier.attempt, rollout.attempt)
            assert earlier.version_spans[0].weight_version > shared, f"{key} was there already"
        if earlier is None or rollout.attempt > earlier.attempt:
            first[key] = rollout


def test_a_rollout_that_an_old_process_writes_later_is_refused() -> None:
    acceptance = Acceptance(AcceptanceRules(attempt=2, max_staleness=1), shared_version=lambda _earlier: 5)
    collector = Collector(
        acceptance,
        score=lambda *_: scored(1.0),
        report=lambda _outcome: None,
        dead_letter=lambda _record, _reason: None,
        refill=lambda _key: None,
    )
    collector.begin({0: 0}, {0: 1})
    collector.open(BatchKey(PURPOSE_TRAIN, 5), [SomePrompt()], 2)
    for sample in (0, 1):
        rollout = Rollout(
            attempt=1,
            id=SampleKey(PURPOSE_TRAIN, 5, 0, sample).to_proto(),
            token_ids=[1],
            logprobs=[-1.0],
            logprob_mode=LOGPROB_MODE_PROCESSED,
            version_spans=[VersionSpan(weight_version=5, num_tokens=1)],
            status=ROLLOUT_STATUS_OK,
            finish_reason=FINISH_REASON_STOP,
        )
        collector.on_records([Record("rollouts", 0, sample, None, rollout.SerializeToString())])
    assert (acceptance.reused, acceptance.refused_attempts) == (1, 1)
    assert str(collector.progress(BatchKey(PURPOSE_TRAIN, 5))) == "1 of 2"


def test_what_was_there_under_this_attempts_own_number_is_of_another_run() -> None:
    acceptance = Acceptance(AcceptanceRules(attempt=1, max_staleness=1))
    acceptance.open(BatchKey(PURPOSE_TRAIN, 0), [SomePrompt()], 1)
    rollout = Rollout(
        attempt=1,
        id=SampleKey(PURPOSE_TRAIN, 0, 0, 0).to_proto(),
        token_ids=[1],
        logprobs=[-1.0],
        logprob_mode=LOGPROB_MODE_PROCESSED,
        version_spans=[VersionSpan(weight_version=0, num_tokens=1)],
        status=ROLLOUT_STATUS_OK,
        finish_reason=FINISH_REASON_STOP,
    )
    assert acceptance.offer(rollout, was_there=True) == Verdict(None)
    assert not acceptance.batch(BatchKey(PURPOSE_TRAIN, 0)).answers
