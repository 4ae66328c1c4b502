"""A few answers of each batch, as rows for people to read."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer_svc.batch_intake import BatchIntake

Describe = Callable[[Any, Sequence[int]], Mapping[str, str]]
"""What a prompt and the token ids of an answer say, as columns."""


class AnswerTable:
    """Picks and describes answers."""

    def __init__(self, describe: Describe, num_answers: int) -> None:
        """
        Args:
            num_answers: of each batch.
        """
        self._describe = describe
        self._num_answers = num_answers

    def rows(self, step: int, batch: BatchIntake) -> list[dict[str, Any]]:
        """Rows of the first answer of each of the first groups: the order in which they came must not choose them."""
        chosen = sorted(batch.answers.values(), key=lambda answer: (answer.key.sample, answer.key.group))
        return [
            {
                "step": step,
                "purpose": "evaluation" if batch.key.is_evaluation else "train",
                **self._describe(batch.prompts[answer.key.group], answer.token_ids),
                "reward": answer.reward,
                "tokens": len(answer.token_ids),
                "truncated": answer.truncated,
                "staleness": answer.staleness,
                "instance": answer.instance,
            }
            for answer in chosen[: self._num_answers]
        ]
