"""How fast each instance is, from the steps of its running engine, as heartbeats report them. Pure state.

Profiles are for planning: instances that are about equally fast share one, so that noise of measurement makes no
difference between them. How noisy it is shows in how far reports are from the mean of those before: instances that
share a machine with others are slower or faster from one moment to the next. What a token in the cache and one of a
prompt cost, instances measure before they register; it is taken off the steps that are observed.
"""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from streamrl.planning.profile import InstanceProfile, TokenLatency
from streamrl.v1.scheduler_pb2 import EngineProfile, StepLatency

if TYPE_CHECKING:
    from scheduler_svc.registry import Life

_MEMORY_STEPS = 2000
"""A mean goes over about so many of the last steps."""
_MEASURED_STEPS = 100
"""What was measured before counts as so many steps."""
_LEAST_SHARE = 0.2
"""Of a step's time, that which does not come from the tokens in the cache is this at least."""
_LIKE = math.log(1.15)
"""Latencies whose logarithms differ by less are taken to be of equally fast instances."""
_STANDARD_ERRORS = 3.0
"""So are those that differ by less than so many standard errors."""
_FIRST_ERROR = 0.05
"""Of a report, relative: taken to be so, by the weight of one report, until more have come."""
_MOST_REPORTS = 50
"""Reports that are close in time are wrong in the same way: beyond so many the mean gets no better."""
_REPORTS_MEMORY = 0.99
"""How far a report was off loses weight with each later one."""
_LARGEST_ERROR = 0.5
"""Of a report: one that is further off, a step that stood still for a moment, says no more."""

_HOUR_S = 3600.0
"""Nothing that an engine does for a token takes longer; who says so was wrong."""


class ObservedLatency:
    """Mean latency of a step by the number of sequences in it, apart from what the tokens in the cache cost."""

    def __init__(self, measured: EngineProfile | None = None) -> None:
        """
        Args:
            measured: by the instance itself, before the first step here.
        """
        self._buckets: dict[int, tuple[float, float, float]] = {}
        """Mean batch size, mean latency and weight of batch sizes 1, 2, 3-4, 5-8, ..."""
        self.held_token_s = self.prefill_token_s = 0.0
        """0: not known."""
        self._num_reports, self._squares = 1.0, _FIRST_ERROR**2
        """Reports, and the squares of by how much their logarithms were off that of the mean before."""
        if measured is not None:
            self.held_token_s = _sensible(measured.held_token_s)
            self.prefill_token_s = _sensible(measured.prefill_token_s)
            self.take(
                StepLatency(
                    batch_size=steps.batch_size,
                    latency_s=steps.latency_s,
                    num_steps=_MEASURED_STEPS,
                    held_tokens=steps.held_tokens,
                )
                for steps in measured.steps
            )

    def take(self, latencies: Iterable[StepLatency]) -> None:
        """Notes what a heartbeat says."""
        for latency in latencies:
            alone_s = max(latency.latency_s - self.held_token_s * latency.held_tokens, _LEAST_SHARE * latency.latency_s)
            if latency.batch_size < 1 or latency.num_steps < 1 or not 0 < alone_s < _HOUR_S:
                continue
            bucket = (latency.batch_size - 1).bit_length()
            size, seconds, weight = self._buckets.get(bucket, (0.0, 0.0, 0.0))
            total = weight + latency.num_steps
            share = latency.num_steps / total
            if weight:
                off = min(abs(math.log(alone_s) - math.log(seconds)), _LARGEST_ERROR)
                self._num_reports = _REPORTS_MEMORY * self._num_reports + 1
                self._squares = _REPORTS_MEMORY * self._squares + off**2
            self._buckets[bucket] = (
                size + share * (latency.batch_size - size),
                seconds + share * (alone_s - seconds),
                min(total, _MEMORY_STEPS),
            )

    @property
    def error(self) -> float:
        """Standard error of the latencies, relative."""
        return math.sqrt(self._squares / self._num_reports / min(self._num_reports, _MOST_REPORTS))

    def token_latency(self) -> TokenLatency | None:
        """By batch size; None: nothing was observed. A larger batch is never taken to be faster: where it seems to be,
        both are as their mean, by the steps behind each."""
        observed = [steps for _, steps in sorted(self._buckets.items())]
        if not observed:
            return None
        sizes, seconds, weights = zip(*observed, strict=True)
        return TokenLatency(dict(zip(map(round, sizes), rising(seconds, weights), strict=True)))


def _sensible(token_s: float) -> float:
    """What a token is said to take; 0, not known, for what makes no sense."""
    return token_s if 0 <= token_s < _HOUR_S else 0.0


def rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The values that never fall and are closest to others, by weighted squares (isotonic regression).

    Args:
        weights: positive, one a value.
    """
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        mean, total, count = value, weight, 1
        while blocks and blocks[-1][0] > mean:
            before, more, others = blocks.pop()
            mean = (mean * total + before * more) / (total + more)
            total, count = total + more, count + others
        blocks.append((mean, total, count))
    return [mean for mean, _, count in blocks for _ in range(count)]


def fleet_profiles(lives: Sequence["Life"]) -> dict[str, InstanceProfile]:
    """The profile of each instance, by name. One that nothing is known of is taken to be like the first of its size;
    where none is, it is left out."""
    by_size: dict[tuple[int, int], list[tuple[InstanceProfile, float]]] = {}
    found: dict[str, InstanceProfile] = {}
    for life in lives:
        latency = life.latency.token_latency()
        if latency is not None:
            alike = by_size.setdefault(_size(life), [])
            profile = InstanceProfile(
                latency,
                life.request.max_running,
                held_token_s=life.latency.held_token_s,
                prefill_token_s=life.latency.prefill_token_s,
                kv_cache_tokens=life.request.kv_cache_tokens or float("inf"),
            )
            error = life.latency.error
            like = next((other for other, its in alike if _are_alike(other, profile, math.hypot(its, error))), None)
            if like is None:
                alike.append((profile, error))
            found[life.name] = like or profile
    for life in lives:
        if life.name not in found and (alike := by_size.get(_size(life), [])):
            found[life.name] = alike[0][0]
    return found


def _size(life: "Life") -> tuple[int, int]:
    return life.request.max_running, life.request.kv_cache_tokens


def _are_alike(one: InstanceProfile, other: InstanceProfile, error: float) -> bool:
    """Whether two instances of one size are equally fast at one sequence, at a quarter and at all, with an empty cache
    and with a full one, and with prompts.

    Args:
        error: standard error of the difference between their latencies, relative.
    """
    sizes = {1, max(1, one.max_running // 4), one.max_running}
    full = one.kv_cache_tokens if one.kv_cache_tokens < float("inf") else 0.0
    ratios = [
        (one.token_latency(size) + one.held_token_s * held) / (other.token_latency(size) + other.held_token_s * held)
        for size in sizes
        for held in (0.0, full)
    ]
    prompts = one.prefill_token_s, other.prefill_token_s
    near = max(_LIKE, _STANDARD_ERRORS * error)
    return all(abs(math.log(ratio)) < near for ratio in ratios) and max(prompts) <= 2 * min(prompts)
