"""When a sample may begin and when an instance changes its weights: one pure decision.

A sample begins only under a version that it allows: `min_weight_version` or a later one, or exactly
`exact_weight_version` (pinned). A sample that needs a version which is not announced yet holds up nobody. Among the
others order is kept: who waits for a switch is not overtaken by those that would delay it.

* boundary: before the first sample of another batch the instance goes to the newest version, once nothing runs. A
  batch that runs here goes on under the version it began with.
* in_flight: the instance goes to a newer version at once, under what runs, except under pinned samples. Back to an
  older version, which only a pinned sample asks for, it goes when nothing runs: an answer's versions never fall.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

from generator_svc.sample import Sample
from streamrl.identity import BatchKey

Swap = Literal["boundary", "in_flight"]


@dataclass(frozen=True, slots=True)
class Target:
    """A version to go to."""

    weight_version: int
    exact: bool
    """Whether a later one would not do."""


@dataclass(frozen=True, slots=True)
class GateState:
    """What the decision rests on."""

    loaded: int
    """The version that the engine has."""
    newest: int
    """The newest announced version."""
    switching_to: Target | None
    """A switch that is under way: its version is being fetched or loaded."""
    num_running: int
    """Samples that the engine has, begun or not."""
    num_pinned_running: int
    running_batches: Collection[BatchKey]


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now: first admit, then begin the switch. Neither: wait."""

    admit: list[Sample] = field(default_factory=list)
    """In order of priority."""
    switch_to: Target | None = None


def decide(waiting: Iterable[Sample], state: GateState, swap: Swap) -> Decision:
    """
    Args:
        waiting: in order of priority.
    """
    announced = max(state.newest, state.loaded)
    ready = (sample for sample in waiting if sample.required_version <= announced)
    return _at_boundaries(ready, state) if swap == "boundary" else _in_flight(ready, state)


def _at_boundaries(ready: Iterable[Sample], state: GateState) -> Decision:
    if state.switching_to is not None:
        return Decision()
    admit: list[Sample] = []
    begun = set(state.running_batches)
    target = _newer(state)
    for sample in ready:
        goes_on = sample.batch_key in begun or sample.is_pinned or state.newest <= state.loaded
        if not (goes_on and sample.may_begin_with(state.loaded)):
            target = _target(sample, state)
            break
        admit.append(sample)
        begun.add(sample.batch_key)
    idle = state.num_running == 0 and not admit
    return Decision(admit, target if idle else None)


def _in_flight(ready: Iterable[Sample], state: GateState) -> Decision:
    admit: list[Sample] = []
    target = state.switching_to or _newer(state)
    blocked = state.switching_to is not None
    num_pinned = state.num_pinned_running
    for sample in ready:
        if sample.may_begin_with(state.loaded) and not (blocked and (sample.is_pinned or _goes_back(target, state))):
            admit.append(sample)
            num_pinned += sample.is_pinned
        elif not blocked:
            blocked = True
            target = _target(sample, state)
    if state.switching_to is not None or target is None:
        return Decision(admit)
    nothing_runs = state.num_running == 0 and not admit
    possible = nothing_runs if _goes_back(target, state) else num_pinned == 0
    return Decision(admit, target if possible else None)


def _newer(state: GateState) -> Target | None:
    return Target(state.newest, exact=False) if state.newest > state.loaded else None


def _target(sample: Sample, state: GateState) -> Target:
    """Where an instance goes for a sample that may not begin with the loaded version."""
    if sample.exact_weight_version is not None:
        return Target(sample.exact_weight_version, exact=True)
    return Target(max(state.newest, state.loaded), exact=False)


def _goes_back(target: Target | None, state: GateState) -> bool:
    return target is not None and target.weight_version < state.loaded
