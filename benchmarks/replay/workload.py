"""Prompts of which a ranker can learn how long their answers are, those lengths, and what a device takes. Pure.

Lengths are the paper's, scaled. How long answers are is told by a prompt as far as the paper's ranker finds the longest
fifth of them (0.87): "to B from A" has the longer answers the further B is from A. A device's steps are the paper's
(Fig 6), slowed down; the cache that it holds costs it nothing.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import NormalDist

import numpy as np

from benchmarks import paper_workload
from benchmarks.emulation.lengths import PROMPT_CORRELATION
from benchmarks.emulation.plan import prompt_key
from trainer_svc.counting_task import MAX_NUMBER

FILE = "lengths.json"
"""In the run's folder, for its generators."""
SLOWDOWN = 3.0
"""A step of a device takes so many times what the paper's does: cores then have time for each step of each engine."""


@dataclass(frozen=True)
class ReplayedPrompt:
    """A prompt, and how many tokens each of its answers has."""

    text: str
    lengths: tuple[int, ...]


def replayed_prompts(count: int, num_samples: int, longest: int, seed: int) -> list[ReplayedPrompt]:
    """Distinct prompts.

    Args:
        longest: tokens of the longest answer.

    Raises:
        ValueError: there are not so many.
    """
    pairs = list(combinations(range(MAX_NUMBER + 1), 2))
    generator = np.random.default_rng(seed)
    stretches = np.array([stop - start for start, stop in pairs])
    # Of stretches of one length each is as likely to be the longer one.
    ranks = np.argsort(np.lexsort((generator.random(len(pairs)), stretches)))
    found = []
    for index in generator.choice(len(pairs), size=count, replace=False).tolist():
        start, stop = pairs[index]
        told = NormalDist().inv_cdf((ranks[index] + 0.5) / len(pairs))
        scores = PROMPT_CORRELATION * told + math.sqrt(1 - PROMPT_CORRELATION**2) * generator.normal(size=num_samples)
        lengths = [paper_workload.length_at(NormalDist().cdf(score)) for score in scores.tolist()]
        scaled = [max(1, round(length * longest / paper_workload.LONGEST)) for length in lengths]
        found.append(ReplayedPrompt(f"to {stop} from {start}", tuple(scaled)))
    return found


class ReplayedLengths:
    """By a prompt's tokens and the number of the answer."""

    def __init__(self, lengths: Mapping[str, Sequence[int]]) -> None:
        self._lengths = lengths

    @classmethod
    def of(cls, prompts: Sequence[ReplayedPrompt], token_ids: Sequence[Sequence[int]]) -> "ReplayedLengths":
        """
        Args:
            token_ids: of each prompt.
        """
        return cls({prompt_key(tokens): prompt.lengths for prompt, tokens in zip(prompts, token_ids, strict=True)})

    @classmethod
    def read(cls, folder: Path) -> "ReplayedLengths":
        """What `write` has put into a run's folder."""
        return cls(json.loads((folder / FILE).read_text()))

    def write(self, folder: Path) -> None:
        """Puts them into a run's folder."""
        (folder / FILE).write_text(json.dumps(self._lengths))

    def tokens(self, prompt_token_ids: Sequence[int], sample: int) -> int | None:
        """Of an answer; None: this prompt is none of them."""
        lengths = self._lengths.get(prompt_key(prompt_token_ids))
        return None if lengths is None else lengths[sample]


def device_step_s(num_sequences: int, num_tokens: int) -> float:
    """What a step takes.

    Args:
        num_tokens: one a sequence, and more for those whose prompts are computed.
    """
    if num_sequences == 0:
        return 0.0
    of_prompts_s = paper_workload.PREFILL_TOKEN_S * (num_tokens - num_sequences)
    return SLOWDOWN * (paper_workload.TOKEN_LATENCY(num_sequences) + of_prompts_s)
