"""Evaluations of weight versions by the fleet: greedy answers to held-out prompts, each of exactly one.

When an evaluation is waited for is the training loop's and its pacing's decision.
"""

import logging
from collections.abc import Mapping, Sequence

from streamrl.identity import BatchKey
from trainer_svc.batch_intake import BatchIntake
from trainer_svc.collector import Collector, Progress
from trainer_svc.figures import evaluation_figures
from trainer_svc.lineage import EvaluationResult
from trainer_svc.prompt_writer import DrawnPrompt, PromptWriter

logger = logging.getLogger(__name__)


class Evaluations:
    """The evaluations that are under way."""

    def __init__(
        self,
        prompts: Sequence[DrawnPrompt],
        *,
        every: int,
        num_iterations: int,
        writer: PromptWriter,
        collector: Collector,
        first_version: int,
        left: Sequence[int],
    ) -> None:
        """
        Args:
            every: iterations between two; 0: only versions 0 and `num_iterations`.
            first_version: that this attempt begins with.
            left: versions up to that one whose evaluation is not over; those of all others are.
        """
        self._prompts = prompts
        self._every = every
        self._num_iterations = num_iterations
        self._writer = writer
        self._collector = collector
        self._first_version = first_version
        self._left = set(left)
        self._begun: set[int] = set()
        self._open: list[BatchKey] = []

    def is_due(self, weight_version: int) -> bool:
        """Whether a version is to be evaluated, and that has not begun."""
        if weight_version in self._begun:
            return False
        if weight_version <= self._first_version:
            return weight_version in self._left
        return weight_version == self._num_iterations or (self._every > 0 and weight_version % self._every == 0)

    def left(self, weight_version: int) -> list[int]:
        """The versions up to this one whose evaluation is due or under way."""
        due = [version for version in {*self._left, weight_version} if self.is_due(version)]
        return sorted({*due, *(key.batch for key in self._open)})

    def open(self, weight_version: int) -> None:
        """Expects the answers of a version's evaluation, without asking for them yet."""
        self._begun.add(weight_version)
        self._open.append(self._writer.open_evaluation(weight_version, self._prompts))

    def ask(self) -> None:
        """Asks the fleet for what is open, each version as soon as it is announced."""
        for key in self._open:
            self._writer.write(key)

    def begin(self, weight_version: int) -> None:
        """Opens an evaluation and asks for it."""
        self.open(weight_version)
        self.ask()

    def give_up(self, weight_version: int) -> None:
        """The version cannot be had any more."""
        self._left.discard(weight_version)

    def under_way(self) -> list[BatchKey]:
        """Those that have begun and were not taken yet."""
        return list(self._open)

    def progress(self) -> Progress:
        """Of the oldest one under way; there must be one."""
        return self._collector.progress(self._open[0])

    def take_finished(self, timeout_s: float = 0.0) -> list[tuple[EvaluationResult, BatchIntake, Mapping[str, float]]]:
        """Ends those of which every answer is there: results, all about their answers, and figures.

        Args:
            timeout_s: how long to wait for the oldest one.
        """
        finished = []
        for index, key in enumerate(self.under_way()):
            if self._collector.wait_complete(key, timeout_s if index == 0 else 0.0):
                self._open.remove(key)
                finished.append(self._finish(key))
        return finished

    def _finish(self, key: BatchKey) -> tuple[EvaluationResult, BatchIntake, Mapping[str, float]]:
        batch = self._collector.close(key)
        answers = list(batch.answers.values())
        # A prompt without an answer says nothing about the weights: it is left out, not counted as wrong.
        if len(answers) < batch.num_samples:
            logger.warning("version=%d: %d prompts got no answer", key.batch, batch.num_samples - len(answers))
        figures = evaluation_figures(answers)
        accuracy = figures.get("eval/accuracy", 0.0)
        logger.info("version=%d: accuracy %.3f of %d prompts", key.batch, accuracy, len(answers))
        return EvaluationResult(key.batch, accuracy, len(answers)), batch, figures
