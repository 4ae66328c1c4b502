"""How long the answer to a prompt will be, from answers that came before.

How hard a prompt is belongs to the prompt: the length of its last answers says most about the next ones (paper,
section on the output-length ranker). Pure state; the same answers give the same estimates, in whatever order they come.
"""

from collections import Counter
from dataclasses import dataclass

_MOST_PROMPTS = 500_000
"""Of more prompts than this the longest unseen is forgotten."""


@dataclass(slots=True)
class _LastDrawn:
    """A prompt's answers in the newest batch that had it. Older ones are of an older policy."""

    batch: int
    num_answers: int
    num_tokens: int


class LengthHistory:
    """Lengths of answers by prompt."""

    def __init__(self, most_prompts: int = _MOST_PROMPTS) -> None:
        self._most_prompts = most_prompts
        self._by_prompt: dict[str, _LastDrawn] = {}
        self._answers_by_length: Counter[int] = Counter()
        self._num_answers = 0
        self._median: int | None = None

    def observe(self, prompt_id: str, batch: int, num_tokens: int) -> None:
        """Notes one answer."""
        self._answers_by_length[num_tokens] += 1
        self._num_answers += 1
        self._median = None
        last = self._by_prompt.get(prompt_id)
        if last is None or batch > last.batch:
            # Popped first: the dict's order is that of the last batch.
            self._by_prompt.pop(prompt_id, None)
            self._by_prompt[prompt_id] = _LastDrawn(batch, 1, num_tokens)
            if len(self._by_prompt) > self._most_prompts:
                del self._by_prompt[next(iter(self._by_prompt))]
        elif batch == last.batch:
            last.num_answers += 1
            last.num_tokens += num_tokens

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

    def _median_of_all(self) -> int:
        """The lower median."""
        if self._median is None:
            below = 0
            for num_tokens in sorted(self._answers_by_length):
                below += self._answers_by_length[num_tokens]
                if 2 * below >= self._num_answers:
                    self._median = num_tokens
                    break
        assert self._median is not None
        return self._median
