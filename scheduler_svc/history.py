"""How long the answer to a prompt will be, from answers that came before.

How hard a prompt is belongs to the prompt: the length of its last answers says most about the next ones (paper,
section on the output-length ranker). Pure state; the same answers give the same estimates, in whatever order they come.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from streamrl.planning.forecast import LEVELS

_MOST_PROMPTS = 500_000
"""Of more prompts than this the longest unseen is forgotten."""

_RATIO_STEP = 0.05
"""Ratios of an answer's length to what was expected are counted in steps of this, in their logarithm."""
_FIRST_SPREAD = 0.5
"""Standard deviation of that logarithm as long as little is known."""
_FIRST_WEIGHT = 64
"""As many answers count as little."""


@dataclass(slots=True)
class _LastDrawn:
    """A prompt's answers in the newest batch that had it. Older ones are of an older policy."""

    batch: int
    num_answers: int
    num_tokens: int
    earlier_mean: float | None = None
    """In the batch before that one."""


class LengthHistory:
    """Lengths of answers by prompt."""

    def __init__(self, most_prompts: int = _MOST_PROMPTS) -> None:
        self._most_prompts = most_prompts
        self._by_prompt: dict[str, _LastDrawn] = {}
        self._answers_by_length: Counter[int] = Counter()
        self._num_answers = 0
        self._lengths: tuple[float, ...] | None = None
        """Quantiles of all answers."""
        self._ratios: Counter[int] = Counter()
        """How often an answer was so much longer or shorter than those before to the same prompt."""
        self._factors: tuple[float, ...] | None = None
        """Quantiles of these."""

    def observe(self, prompt_id: str, batch: int, num_tokens: int) -> None:
        """Notes one answer."""
        self._answers_by_length[num_tokens] += 1
        self._num_answers += 1
        self._lengths = None
        last = self._by_prompt.get(prompt_id)
        if last is None or batch > last.batch:
            # Popped first: the dict's order is that of the last batch.
            self._by_prompt.pop(prompt_id, None)
            earlier = None if last is None else last.num_tokens / last.num_answers
            last = self._by_prompt[prompt_id] = _LastDrawn(batch, 1, num_tokens, earlier)
            if len(self._by_prompt) > self._most_prompts:
                del self._by_prompt[next(iter(self._by_prompt))]
        elif batch == last.batch:
            last.num_answers += 1
            last.num_tokens += num_tokens
        else:
            return
        if last.earlier_mean and num_tokens > 0:
            self._ratios[round(math.log(num_tokens / last.earlier_mean) / _RATIO_STEP)] += 1
            self._factors = None

    def last_mean(self, prompt_id: str) -> float | None:
        """The mean length of a prompt's last answers; None: there are none."""
        last = self._by_prompt.get(prompt_id)
        return None if last is None else last.num_tokens / last.num_answers

    def expected_tokens(self, prompt_id: str, max_tokens: int) -> int:
        """The mean length of a prompt's last answers, else the median of all answers, else `max_tokens`.

        Args:
            max_tokens: the answer is cut there.

        Returns:
            1 to `max_tokens`.
        """
        last = self._by_prompt.get(prompt_id)
        if last is not None:
            expected = round(last.num_tokens / last.num_answers)
        elif self._num_answers:
            expected = self._median_of_all()
        else:
            expected = max_tokens
        return max(1, min(expected, max_tokens))

    def forecast(self, prompt_id: str, max_tokens: int) -> tuple[float, ...]:
        """The distribution of the length of an answer, cut at `max_tokens`: lengths at `forecast.LEVELS`.

        Around the mean of the prompt's last answers as far as answers were found around such means; else that of all
        answers; else even.
        """
        last = self._by_prompt.get(prompt_id)
        if last is not None:
            mean = last.num_tokens / last.num_answers
            lengths: Sequence[float] = [mean * factor for factor in self._spread()]
        elif self._num_answers:
            lengths = self._all_lengths()
        else:
            lengths = [level * max_tokens for level in LEVELS]
        return tuple(max(1.0, min(length, float(max_tokens))) for length in lengths)

    def recent_quantile(self, level: float) -> float | None:
        """Of all answers; None: there are none."""
        return _quantiles(self._answers_by_length, (level,))[0] if self._num_answers else None

    def _median_of_all(self) -> int:
        """The lower median."""
        return int(self._all_lengths()[LEVELS.index(0.5)])

    def _all_lengths(self) -> tuple[float, ...]:
        if self._lengths is None:
            self._lengths = _quantiles(self._answers_by_length, LEVELS)
        return self._lengths

    def _spread(self) -> tuple[float, ...]:
        if self._factors is None:
            first = NormalDist(sigma=_FIRST_SPREAD / _RATIO_STEP)
            counts = Counter(self._ratios)
            for part in range(_FIRST_WEIGHT):
                counts[round(first.inv_cdf((part + 0.5) / _FIRST_WEIGHT))] += 1
            self._factors = tuple(math.exp(step * _RATIO_STEP) for step in _quantiles(counts, LEVELS))
        return self._factors


def _quantiles(counts: Counter[int], levels: Sequence[float]) -> tuple[float, ...]:
    """Of counted values, the least that is not exceeded by a share of them."""
    total, below, found = counts.total(), 0, []
    wanted = iter(levels)
    level = next(wanted, None)
    for value in sorted(counts):
        below += counts[value]
        while level is not None and below >= level * total:
            found.append(float(value))
            level = next(wanted, None)
    return tuple(found)
