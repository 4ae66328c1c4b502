"""How fast each instance is, from the steps of its running engine, as heartbeats report them. Pure state.

Profiles are for planning: instances that are about equally fast share one, so that noise of measurement makes no
difference between them. What it leaves out: the cost of held context and of prompts, which heartbeats do not tell.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from streamrl.planning.profile import InstanceProfile, TokenLatency
from streamrl.v1.scheduler_pb2 import StepLatency

if TYPE_CHECKING:
    from scheduler_svc.registry import Life

_MEMORY_STEPS = 2000
"""A mean goes over about so many of the last steps."""
_LIKE = 0.15
"""Latencies that differ by less, relative, are taken to be of equally fast instances."""


class ObservedLatency:
    """Mean latency of a step by the number of sequences in it."""

    def __init__(self) -> None:
        self._buckets: dict[int, tuple[float, float, float]] = {}
        """Mean batch size, mean latency and weight of batch sizes 1, 2, 3-4, 5-8, ..."""

    def take(self, latencies: Iterable[StepLatency]) -> None:
        """Notes what a heartbeat says."""
        for latency in latencies:
            if latency.batch_size < 1 or latency.num_steps < 1 or not latency.latency_s > 0:
                continue
            bucket = (latency.batch_size - 1).bit_length()
            size, seconds, weight = self._buckets.get(bucket, (0.0, 0.0, 0.0))
            total = weight + latency.num_steps
            share = latency.num_steps / total
            self._buckets[bucket] = (
                size + share * (latency.batch_size - size),
                seconds + share * (latency.latency_s - seconds),
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
            profile = next((other for other in alike if _are_alike(other, latency)), None)
            if profile is None:
                kv_cache_tokens = life.request.kv_cache_tokens or float("inf")
                profile = InstanceProfile(latency, life.request.max_running, kv_cache_tokens=kv_cache_tokens)
                alike.append(profile)
            found[life.name] = profile
    for life in lives:
        if life.name not in found and (alike := by_size.get(_size(life), [])):
            found[life.name] = alike[0]
    return found


def _size(life: "Life") -> tuple[int, int]:
    return life.request.max_running, life.request.kv_cache_tokens


def _are_alike(profile: InstanceProfile, latency: TokenLatency) -> bool:
    """Whether two instances of one size are equally fast at one sequence, at a quarter and at all."""
    sizes = {1, max(1, profile.max_running // 4), profile.max_running}
    return all(abs(profile.token_latency(size) / latency(size) - 1) < _LIKE for size in sizes)
