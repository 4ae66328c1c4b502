"""How fast each instance is, from the steps of its running engine, as heartbeats report them. Pure state.

Profiles are for planning: instances that are about equally fast share one, so that noise of measurement makes no
difference between them. What a token in the cache and one of a prompt cost, instances measure before they register; it
is taken off the steps that are observed.
"""

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
_LIKE = 0.15
"""Latencies that differ by less, relative, are taken to be of equally fast instances."""


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
        if measured is not None:
            self.held_token_s, self.prefill_token_s = measured.held_token_s, measured.prefill_token_s
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
            if latency.batch_size < 1 or latency.num_steps < 1 or not latency.latency_s > 0:
                continue
            bucket = (latency.batch_size - 1).bit_length()
            size, seconds, weight = self._buckets.get(bucket, (0.0, 0.0, 0.0))
            total = weight + latency.num_steps
            share = latency.num_steps / total
            alone_s = max(latency.latency_s - self.held_token_s * latency.held_tokens, _LEAST_SHARE * latency.latency_s)
            self._buckets[bucket] = (
                size + share * (latency.batch_size - size),
                seconds + share * (alone_s - seconds),
                min(total, _MEMORY_STEPS),
            )

    def token_latency(self) -> TokenLatency | None:
        """By batch size; None: nothing was observed. A larger batch is never taken to be faster."""
        points: dict[int, float] = {}
        slowest = 0.0
        for _, (size, seconds, _) in sorted(self._buckets.items()):
            slowest = max(slowest, seconds)
            points[round(size)] = slowest
        return TokenLatency(points) if points else None


def fleet_profiles(lives: Sequence["Life"]) -> dict[str, InstanceProfile]:
    """The profile of each instance, by name. One that nothing is known of is taken to be like the first of its size;
    where none is, it is left out."""
    by_size: dict[tuple[int, int], list[InstanceProfile]] = {}
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
            like = next((other for other in alike if _are_alike(other, profile)), None)
            if like is None:
                alike.append(profile)
            profile = like or profile
            found[life.name] = profile
    for life in lives:
        if life.name not in found and (alike := by_size.get(_size(life), [])):
            found[life.name] = alike[0]
    return found


def _size(life: "Life") -> tuple[int, int]:
    return life.request.max_running, life.request.kv_cache_tokens


def _are_alike(one: InstanceProfile, other: InstanceProfile) -> bool:
    """Whether two instances of one size are equally fast at one sequence, at a quarter and at all, with an empty cache
    and with a full one, and with prompts."""
    sizes = {1, max(1, one.max_running // 4), one.max_running}
    full = one.kv_cache_tokens if one.kv_cache_tokens < float("inf") else 0.0
    ratios = [
        (one.token_latency(size) + one.held_token_s * held) / (other.token_latency(size) + other.held_token_s * held)
        for size in sizes
        for held in (0.0, full)
    ]
    prompts = one.prefill_token_s, other.prefill_token_s
    return all(abs(ratio - 1) < _LIKE for ratio in ratios) and max(prompts) <= 2 * min(prompts)
