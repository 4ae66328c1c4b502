from generator_svc.assignment_queue import AssignmentQueue, Revocation
from generator_svc.sample import Sample
from streamrl.identity import PURPOSE_EVALUATION, PURPOSE_TRAIN, BatchKey, SampleKey


def make_sample(sample: int, *, priority: int = 0, dispatch: int = 1, exact: int | None = None) -> Sample:
    return Sample(
        key=SampleKey(PURPOSE_TRAIN if exact is None else PURPOSE_EVALUATION, 0, 0, sample),
        dispatch=dispatch,
        prompt_token_ids=(1,),
        temperature=1.0,
        max_tokens=4,
        stop_token_ids=(),
        seed=0,
        min_weight_version=0,
        exact_weight_version=exact,
        priority=priority,
        received_s=0.0,
    )


def test_samples_wait_by_priority_and_then_in_the_order_they_came() -> None:
    queue = AssignmentQueue()
    for number, priority in enumerate([2, 1, 2, 1]):
        queue.add(make_sample(number, priority=priority))
    assert [sample.key.sample for sample in queue.waiting] == [1, 3, 0, 2]


def test_running_samples_are_counted_by_batch_and_pin() -> None:
    queue = AssignmentQueue()
    train, pinned = make_sample(0), make_sample(1, exact=0)
    for sample in (train, pinned):
        queue.add(sample)
    queue.start([train, pinned])
    assert (queue.num_running, queue.num_pinned_running) == (2, 1)
    assert set(queue.running_batches) == {BatchKey(PURPOSE_TRAIN, 0), BatchKey(PURPOSE_EVALUATION, 0)}
    queue.finish(pinned)
    assert (queue.num_running, queue.num_pinned_running) == (1, 0)
    assert set(queue.running_batches) == {BatchKey(PURPOSE_TRAIN, 0)}


def test_a_waiting_sample_is_given_back_and_a_repeated_revoke_gets_the_same_answer() -> None:
    queue = AssignmentQueue()
    queue.add(make_sample(0))
    key = make_sample(0).key
    assert queue.revoke(key) is Revocation.REVOKED
    assert not queue.waiting
    assert queue.revoke(key) is Revocation.GIVEN_BACK


def test_a_running_sample_is_aborted() -> None:
    queue = AssignmentQueue()
    sample = make_sample(0)
    queue.add(sample)
    queue.start([sample])
    assert queue.revoke(sample.key) is Revocation.ABORT
    assert queue.num_running == 0
    assert queue.revoke(sample.key) is Revocation.GIVEN_BACK


def test_a_sent_sample_is_not_revoked() -> None:
    queue = AssignmentQueue()
    sample = make_sample(0)
    queue.add(sample)
    queue.start([sample])
    queue.finish(sample)
    assert queue.revoke(sample.key) is Revocation.SENT


def test_a_revoke_that_overtakes_its_assignment_applies_when_that_comes() -> None:
    queue = AssignmentQueue()
    sample = make_sample(0)
    assert queue.revoke(sample.key) is Revocation.KEPT
    assert queue.add(sample) is False
    assert not queue.waiting
    assert queue.add(make_sample(0, dispatch=2)) is True
    assert [waiting.dispatch for waiting in queue.waiting] == [2]


def test_a_record_read_twice_changes_nothing() -> None:
    queue = AssignmentQueue()
    sample = make_sample(0)
    queue.add(sample)
    queue.add(sample)
    assert len(queue.waiting) == 1
    queue.start([sample])
    queue.add(sample)
    queue.finish(sample)
    queue.add(sample)
    assert not queue.waiting
    queue.add(make_sample(0, dispatch=2))
    assert len(queue.waiting) == 1


def test_a_sample_that_is_dispatched_again_while_it_runs_answers_the_later_dispatch() -> None:
    queue = AssignmentQueue()
    sample = make_sample(0)
    queue.add(sample)
    queue.start([sample])
    assert queue.add(make_sample(0, dispatch=2)) is True
    assert not queue.waiting
    assert queue.finish(sample) == 2
