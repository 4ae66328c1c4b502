"""What the model is taught: prompts, what ends an answer, and what an answer is worth."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer_svc.data import Prompt, PromptSets, load_prompts
from trainer_svc.models import ModelFiles, stop_token_ids
from trainer_svc.rewards import RewardInput, RewardSum, load_rewards
from trainer_svc.settings import TrainerSettings

logger = logging.getLogger(__name__)

_NUM_CANARIES = 4


@dataclass(frozen=True)
class Task:
    """Prompts and rewards, joined by the tokenizer."""

    prompts: PromptSets
    rewards: RewardSum
    tokenizer: Any
    stop_token_ids: tuple[int, ...]

    def response(self, token_ids: Sequence[int]) -> str:
        """An answer's text, without the token that ended it."""
        ended = bool(token_ids) and token_ids[-1] in self.stop_token_ids
        text: str = self.tokenizer.decode(token_ids[:-1] if ended else token_ids, skip_special_tokens=True)
        return text

    def score(self, prompt: Prompt, token_ids: Sequence[int], truncated: bool) -> float:
        """The reward of an answer.

        Raises:
            RewardError: a reward function failed on it.
        """
        sample = RewardInput(
            prompt=prompt.record.text,
            response=self.response(token_ids),
            answer=prompt.record.answer,
            finished=not truncated,
            metadata=prompt.record.metadata,
        )
        return self.rewards.score(sample).total

    def describe(self, prompt: Prompt, token_ids: Sequence[int]) -> Mapping[str, str]:
        """Columns for a table of answers."""
        return {
            "prompt": prompt.record.text,
            "response": self.response(token_ids),
            "answer": prompt.record.answer,
        }

    def canaries(self, max_tokens: int) -> list[list[int]]:
        """Fixed sequences of at most `max_tokens` together: the first held-out prompts with their keys as answers."""
        most = max_tokens // _NUM_CANARIES
        sequences = []
        for prompt in self.prompts.evaluation[:_NUM_CANARIES]:
            sequences.append([*prompt.token_ids, *self._tokens_of_key(prompt.record.answer)][:most])
        return [sequence for sequence in sequences if len(sequence) >= 2]

    def _tokens_of_key(self, answer: str) -> list[int]:
        """None, when the model has no tokens for it: a reward may still know what to do with such a key."""
        try:
            tokens: list[int] = self.tokenizer.encode(answer, add_special_tokens=False)
        except Exception as error:  # the library raises nothing more special
            logger.info("a key cannot be written in the model's tokens: %s", error)
            return []
        return tokens


def load_task(settings: TrainerSettings, model: ModelFiles) -> Task:
    """Reads prompts and finds reward functions, and tries both.

    Raises:
        ValueError: they cannot be used with each other or with the model.
    """
    prompts = load_prompts(
        settings.data, model.tokenizer, seed=settings.run.seed, num_eval_prompts=settings.eval.num_prompts
    )
    longest = max(prompts.train.longest, prompts.evaluation.longest) + settings.generator.max_tokens
    limits = [limit for limit in (model.max_context_tokens, settings.generator.max_model_len) if limit]
    if limits and longest > min(limits):
        raise ValueError(
            f"the longest prompt and generator.max_tokens make {longest} tokens, and the model (or "
            f"generator.max_model_len) takes {min(limits)}: lower generator.max_tokens or data.max_prompt_tokens"
        )
    rewards = load_rewards(settings.reward.functions)
    record = prompts.train[0].record
    rewards.check(record.text, record.answer, record.metadata)
    return Task(prompts, rewards, model.tokenizer, tuple(stop_token_ids(model, settings.data.stop)))
