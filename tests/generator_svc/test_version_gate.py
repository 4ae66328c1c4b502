"""The gate as a whole: whatever comes in whatever order, its rules hold and nothing is left behind."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generator_svc.assignment_queue import AssignmentQueue
from generator_svc.sample import Sample
from generator_svc.version_gate import GateState, Swap, Target, decide
from streamrl.identity import PURPOSE_EVALUATION, PURPOSE_TRAIN, SampleKey


def make_sample(
    sample: int, batch: int = 0, min_version: int = 0, exact: int | None = None, priority: int | None = None
) -> Sample:
    purpose = PURPOSE_TRAIN if exact is None else PURPOSE_EVALUATION
    return Sample(
        key=SampleKey(purpose, batch, 0, sample),
        dispatch=1,
        prompt_token_ids=(1,),
        temperature=1.0,
        max_tokens=4,
        stop_token_ids=(),
        seed=0,
        min_weight_version=min_version,
        exact_weight_version=exact,
        priority=batch if priority is None else priority,
        received_s=0.0,
    )


@dataclass
class Instance:
    """An instance in which switches take time and every event is ours."""

    swap: Swap
    queue: AssignmentQueue = field(default_factory=AssignmentQueue)
    loaded: int = 0
    newest: int = 0
    switching_to: Target | None = None
    began_with: dict[SampleKey, int] = field(default_factory=dict)

    def add(self, *samples: Sample) -> None:
        for sample in samples:
            self.queue.add(sample)

    def settle(self) -> tuple[list[int], Target | None]:
        """Does what the gate says, once: (sample numbers admitted, switch begun)."""
        queue = self.queue
        state = GateState(
            self.loaded,
            self.newest,
            self.switching_to,
            queue.num_running,
            queue.num_pinned_running,
            set(queue.running_batches),
        )
        decision = decide(queue.waiting, state, self.swap)
        for sample in decision.admit:
            assert sample.may_begin_with(self.loaded)
            self.began_with[sample.key] = self.loaded
        if self.switching_to is not None and decision.admit:
            assert self.swap == "in_flight"
            assert not any(sample.is_pinned for sample in decision.admit)
        queue.start(decision.admit)
        if decision.switch_to is not None:
            assert self.switching_to is None
            assert decision.switch_to.weight_version != self.loaded
            self.switching_to = decision.switch_to
        return [sample.key.sample for sample in decision.admit], decision.switch_to

    def finish_switch(self) -> None:
        target = self.switching_to
        assert target is not None
        if self.swap == "boundary":
            assert self.queue.num_running == 0
        assert self.queue.num_pinned_running == 0
        if target.weight_version < self.loaded:
            assert self.queue.num_running == 0
        self.loaded = target.weight_version if target.exact else max(target.weight_version, self.newest)
        self.switching_to = None

    def finish_sample(self, choose: Callable[[list[Sample]], Sample]) -> None:
        self.queue.finish(choose(sorted(self.queue.running, key=lambda sample: sample.key)))

    def run_out(self) -> None:
        """Lets everything that can happen happen."""
        while True:
            admitted, _ = self.settle()
            if self.switching_to is not None:
                self.finish_switch()
            elif self.queue.num_running:
                self.finish_sample(lambda running: running[0])
            elif not admitted:
                return


@st.composite
def events(draw: st.DrawFn) -> list[tuple[str, Sample | None]]:
    """Assignments of batches and evaluations in any order, announcements, and ends in between."""
    count = 0
    drawn: list[tuple[str, Sample | None]] = []
    for kind in draw(
        st.lists(st.sampled_from(["train", "evaluation", "announce", "switched", "finished"]), max_size=40)
    ):
        if kind not in ("train", "evaluation"):
            drawn.append((kind, None))
            continue
        batch, priority = draw(st.integers(0, 5)), draw(st.integers(0, 6))
        exact = batch if kind == "evaluation" else None
        minimum = batch if kind == "evaluation" else max(batch - draw(st.integers(0, 2)), 0)
        drawn.append(("assign", make_sample(count, batch, minimum, exact, priority)))
        count += 1
    return drawn


@pytest.mark.parametrize("swap", ["boundary", "in_flight"])
@given(events=events(), seed=st.integers(0, 1000))
def test_rules_hold_and_nothing_is_left_behind(swap: Swap, events: list[tuple[str, Sample | None]], seed: int) -> None:
    instance, chance = Instance(swap), random.Random(seed)
    for kind, sample in events:
        if sample is not None:
            instance.add(sample)
        elif kind == "announce":
            instance.newest += 1
        elif kind == "switched" and instance.switching_to is not None:
            instance.finish_switch()
        elif kind == "finished" and instance.queue.num_running:
            instance.finish_sample(chance.choice)
        instance.settle()

    instance.run_out()

    left = [sample for sample in instance.queue.waiting if sample.required_version <= instance.newest]
    assert left == []
    for sample in instance.queue.waiting:
        assert sample.key not in instance.began_with
    if not instance.began_with or all(key.purpose == PURPOSE_TRAIN for key in instance.began_with):
        assert instance.loaded == instance.newest


def test_boundary_goes_on_with_a_batch_that_runs_and_switches_before_the_next() -> None:
    instance = Instance("boundary", loaded=1, newest=1)
    instance.add(make_sample(0, batch=2, min_version=1))
    assert instance.settle() == ([0], None)
    instance.newest = 2
    instance.add(make_sample(1, batch=2, min_version=1), make_sample(2, batch=3, min_version=1))
    assert instance.settle() == ([1], None)
    instance.queue.finish(next(iter(instance.queue.running)))
    assert instance.settle() == ([], None)
    instance.queue.finish(next(iter(instance.queue.running)))
    assert instance.settle() == ([], Target(2, exact=False))
    instance.finish_switch()
    assert instance.settle() == ([2], None)


def test_boundary_fills_up_with_the_next_batch_while_no_newer_version_is_there() -> None:
    instance = Instance("boundary", loaded=1, newest=1)
    instance.add(make_sample(0, batch=1), make_sample(1, batch=2))
    assert instance.settle() == ([0, 1], None)


@pytest.mark.parametrize("swap", ["boundary", "in_flight"])
def test_an_idle_instance_goes_to_the_newest_version_before_work_comes(swap: Swap) -> None:
    assert Instance(swap, loaded=1, newest=2).settle() == ([], Target(2, exact=False))


@pytest.mark.parametrize("swap", ["boundary", "in_flight"])
def test_evaluation_gets_the_version_it_asks_for_though_a_newer_one_is_there(swap: Swap) -> None:
    instance = Instance(swap, loaded=3, newest=5)
    instance.add(make_sample(0, batch=4, min_version=4, exact=4, priority=0), make_sample(1, batch=6, min_version=5))
    assert instance.settle() == ([], Target(4, exact=True))
    instance.finish_switch()
    admitted, switch = instance.settle()
    assert (admitted, switch) == ([0], None)
    instance.queue.finish(next(iter(instance.queue.running)))
    assert instance.settle() == ([], Target(5, exact=False))


def test_a_sample_whose_version_is_not_announced_holds_up_nobody() -> None:
    instance = Instance("boundary", loaded=1, newest=1)
    instance.add(make_sample(0, batch=3, min_version=2, priority=0), make_sample(1, batch=2, min_version=1, priority=1))
    assert instance.settle() == ([1], None)


def test_in_flight_swaps_under_running_samples_and_admits_meanwhile() -> None:
    instance = Instance("in_flight", loaded=1, newest=1)
    instance.add(make_sample(0, batch=2, min_version=1))
    assert instance.settle() == ([0], None)
    instance.newest = 2
    assert instance.settle() == ([], Target(2, exact=False))
    instance.add(
        make_sample(1, batch=2, min_version=1),
        make_sample(2, batch=3, min_version=2),
        make_sample(3, batch=1, min_version=1, exact=1, priority=9),
    )
    assert instance.settle() == ([1], None)
    instance.finish_switch()
    assert instance.settle() == ([2], None)


def test_in_flight_waits_for_pinned_samples() -> None:
    instance = Instance("in_flight", loaded=1, newest=1)
    instance.add(make_sample(0, batch=1, min_version=1, exact=1), make_sample(1, batch=2, min_version=1))
    assert instance.settle() == ([0, 1], None)
    instance.newest = 2
    assert instance.settle() == ([], None)
    instance.queue.finish(next(sample for sample in instance.queue.running if sample.is_pinned))
    assert instance.settle() == ([], Target(2, exact=False))


def test_in_flight_goes_back_only_when_nothing_runs_and_is_not_kept_from_it() -> None:
    instance = Instance("in_flight", loaded=2, newest=2)
    instance.add(make_sample(0, batch=2, min_version=1, priority=5))
    instance.settle()
    instance.add(
        make_sample(1, batch=1, min_version=1, exact=1, priority=0), make_sample(2, batch=2, min_version=1, priority=6)
    )
    assert instance.settle() == ([], None)
    instance.queue.finish(next(iter(instance.queue.running)))
    assert instance.settle() == ([], Target(1, exact=True))
