"""The samples of one incarnation: those that wait, in their order, those that the engine has, and those that ended.

It keeps the books and decides nothing: when a sample may begin is version_gate.py's affair.
"""

import enum
from bisect import insort
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence

from generator_svc.sample import Sample
from streamrl.identity import BatchKey, SampleKey

_ENDED_REMEMBERED = 65_536
"""Samples that ended are remembered, to answer a revoke or a record read twice; the oldest are forgotten."""


class Revocation(enum.Enum):
    """What a revoke met."""

    REVOKED = enum.auto()
    """The sample waited: it will not be sent."""
    ABORT = enum.auto()
    """The engine has it: abort it there; it will not be sent."""
    GIVEN_BACK = enum.auto()
    """It had been given back before."""
    SENT = enum.auto()
    """Its rollout is on its way."""
    KEPT = enum.auto()
    """It has not come yet. It will be given back when it does."""


class _End(enum.Enum):
    SENT = enum.auto()
    GIVEN_BACK = enum.auto()


class AssignmentQueue:
    """A sample waits, runs, and ends: sent or given back."""

    def __init__(self) -> None:
        self._waiting: list[Sample] = []
        self._waiting_by_key: dict[SampleKey, Sample] = {}
        self._running: dict[SampleKey, Sample] = {}
        self._dispatches: dict[SampleKey, int] = {}
        self._running_batches: Counter[BatchKey] = Counter()
        self._num_pinned_running = 0
        self._ended: OrderedDict[SampleKey, tuple[int, _End]] = OrderedDict()
        self._revoked_early: set[SampleKey] = set()

    @property
    def waiting(self) -> Sequence[Sample]:
        """By priority, equal ones in the order they came."""
        return self._waiting

    @property
    def running(self) -> Iterable[Sample]:
        return self._running.values()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running_batches(self) -> Collection[BatchKey]:
        """The batches that a running sample belongs to."""
        return self._running_batches.keys()

    @property
    def num_pinned_running(self) -> int:
        return self._num_pinned_running

    def add(self, sample: Sample) -> bool:
        """Takes a sample in.

        Returns:
            False when it was revoked before it came: it is given back. A sample that is known already, by a record that
            was read twice, changes nothing; one that is dispatched here again while it is here goes on as the later
            dispatch.
        """
        key = sample.key
        if key in self._waiting_by_key or key in self._running:
            self._dispatches[key] = max(self._dispatches[key], sample.dispatch)
            return True
        ended_dispatch, _ = self._ended.get(key, (0, None))
        if sample.dispatch <= ended_dispatch:
            return True
        if key in self._revoked_early:
            self._revoked_early.remove(key)
            self._end(sample, _End.GIVEN_BACK)
            return False
        self._dispatches[key] = sample.dispatch
        insort(self._waiting, sample, key=lambda waiting: waiting.priority)
        self._waiting_by_key[key] = sample
        return True

    def start(self, samples: Sequence[Sample]) -> None:
        """These go from waiting to running."""
        started = {sample.key for sample in samples}
        self._waiting = [sample for sample in self._waiting if sample.key not in started]
        for sample in samples:
            del self._waiting_by_key[sample.key]
            self._running[sample.key] = sample
            self._running_batches[sample.batch_key] += 1
            self._num_pinned_running += sample.is_pinned

    def finish(self, sample: Sample) -> int:
        """The rollout of a running sample is sent.

        Returns:
            The dispatch that it answers.
        """
        self._stop(sample)
        return self._end(sample, _End.SENT)

    def hand_over(self, sample: Sample) -> int:
        """A running sample goes on elsewhere.

        Returns:
            The dispatch that ends so.
        """
        self._stop(sample)
        return self._end(sample, _End.GIVEN_BACK)

    def given_back_dispatch(self, key: SampleKey) -> int:
        """The dispatch of a sample that was given back."""
        return self._ended[key][0]

    def revoke(self, key: SampleKey) -> Revocation:
        """The scheduler wants a sample back. Repeating it is harmless."""
        if (sample := self._waiting_by_key.get(key)) is not None:
            self._give_back_waiting([sample])
            return Revocation.REVOKED
        if (sample := self._running.get(key)) is not None:
            self._stop(sample)
            self._end(sample, _End.GIVEN_BACK)
            return Revocation.ABORT
        _, end = self._ended.get(key, (0, None))
        if end is None:
            self._revoked_early.add(key)
            return Revocation.KEPT
        return Revocation.SENT if end is _End.SENT else Revocation.GIVEN_BACK

    def give_back_waiting(self, samples: Iterable[Sample] | None = None) -> list[Sample]:
        """Takes waiting samples out for good.

        Args:
            samples: None: all that wait.
        """
        given_back = list(self._waiting if samples is None else samples)
        self._give_back_waiting(given_back)
        return given_back

    def _give_back_waiting(self, samples: Sequence[Sample]) -> None:
        given_back = {sample.key for sample in samples}
        self._waiting = [sample for sample in self._waiting if sample.key not in given_back]
        for sample in samples:
            del self._waiting_by_key[sample.key]
            self._end(sample, _End.GIVEN_BACK)

    def _stop(self, sample: Sample) -> None:
        del self._running[sample.key]
        self._num_pinned_running -= sample.is_pinned
        self._running_batches[sample.batch_key] -= 1
        if not self._running_batches[sample.batch_key]:
            del self._running_batches[sample.batch_key]

    def _end(self, sample: Sample, end: _End) -> int:
        dispatch = self._dispatches.pop(sample.key, sample.dispatch)
        self._ended[sample.key] = (dispatch, end)
        self._ended.move_to_end(sample.key)
        if len(self._ended) > _ENDED_REMEMBERED:
            self._ended.popitem(last=False)
        return dispatch
