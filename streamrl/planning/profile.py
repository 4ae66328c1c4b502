"""How fast a generation instance is, as planners and simulators know it. Pure.

Times are those of the engine's steps: each gives every running sequence one token.
"""

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


class TokenLatency:
    """PTL: seconds that a token takes, by the number of sequences in the running batch. Linear between the measured
    points, constant outside."""

    def __init__(self, latency_s: Mapping[int, float]) -> None:
        """
        Args:
            latency_s: batch size to seconds.

        Raises:
            ValueError: no point, or one that is not above 0.
        """
        if not latency_s:
            raise ValueError("expected the token latency of at least one batch size, got none")
        for batch_size, seconds in latency_s.items():
            if batch_size < 1 or not (0 < seconds < math.inf):
                raise ValueError(
                    f"expected a batch size of 1 or more and a latency above 0, got {batch_size}: {seconds}"
                )
        self.sizes = sorted(latency_s)
        """The measured batch sizes."""
        self._seconds = [latency_s[size] for size in self.sizes]

    def __call__(self, batch_size: int) -> float:
        right = bisect.bisect_left(self.sizes, batch_size)
        if right == 0:
            return self._seconds[0]
        if right == len(self.sizes):
            return self._seconds[-1]
        low, high = self.sizes[right - 1], self.sizes[right]
        share = (batch_size - low) / (high - low)
        return self._seconds[right - 1] + share * (self._seconds[right] - self._seconds[right - 1])

    def of_means(self, batch_sizes: NDArray[np.float64]) -> NDArray[np.float64]:
        """The same of mean batch sizes, which may be broken, any number of them at once."""
        return np.interp(batch_sizes, self.sizes, self._seconds)


@dataclass(frozen=True, slots=True)
class InstanceProfile:
    """One instance's speed and size."""

    token_latency: TokenLatency
    max_running: int
    """Sequences that it runs at once."""
    held_token_s: float = 0.0
    """What each token that running sequences hold in the cache adds to a step: it is read in every one."""
    prefill_token_s: float = 0.0
    """A token of a prompt, or of an answer that goes on elsewhere, until the cache holds it; the rest stands still."""
    kv_cache_tokens: float = math.inf
    """Tokens that the cache holds."""

    def __post_init__(self) -> None:
        if self.max_running < 1:
            raise ValueError(f"expected max_running of 1 or more, got {self.max_running}")

    @property
    def full_rate(self) -> float:
        """Tokens a second of a full batch."""
        return self.max_running / self.token_latency(self.max_running)
