"""Replayed answer lengths, the same in every mode: a function of the prompt and of the sample's seed. Pure.

Lengths are distributed as the paper's. How hard a prompt is belongs to the prompt: its answers are alike, as far as the
paper's ranker, which sees only the prompt, finds the longest fifth of all answers (0.87 of them).
"""

import math
import random
from statistics import NormalDist

from benchmarks import paper_workload
from generator_svc.engine import GenerationRequest

PROMPT_CORRELATION = 0.973
"""Of the normal scores of an answer's length and of its prompt's: with this, prompts in order of their own score have
0.87 of the longest fifth of answers in their first fifth."""


class PaperLengths:
    """Lengths with a maximum of `longest` tokens."""

    def __init__(self, longest: int) -> None:
        self._scale = longest / paper_workload.LONGEST

    def __call__(self, request: GenerationRequest) -> int:
        return self.of(request.prompt_token_ids, request.seed)

    def of(self, prompt_token_ids: list[int], seed: int) -> int:
        """Tokens of an answer, its end included."""
        score = PROMPT_CORRELATION * random.Random(str(prompt_token_ids)).gauss(0, 1)
        score += math.sqrt(1 - PROMPT_CORRELATION**2) * random.Random(seed).gauss(0, 1)
        return max(1, round(self._scale * paper_workload.length_at(NormalDist().cdf(score))))
