"""One batch's way from rollouts to optimizer steps: what is computed when.

    as samples arrive     what concerns one sample alone: log-probs of the reference and of the policy at the batch's
                          start, values of the critic; only what the recipe needs
    as groups settle      advantages and gradients, where answers are compared with those of their group alone and the
                          batch is one step
    after the last one    the same, where advantages are normalised over the batch, or the batch is several steps

Whatever the order of arrival, the steps are those of the batch as a whole: a sum of gradients does not ask for its
order, and what is normalised over the batch waits for all of it. What a recipe consists of is pure
(trainer_svc/advantages.py, losses.py); the passes are the learner's (trainer_svc/learner.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from trainer_svc.advantages import generalised_advantages, normalised
from trainer_svc.algorithms import Algorithm
from trainer_svc.batch_intake import BatchIntake, Intake
from trainer_svc.critic import CriticStats
from trainer_svc.groups import SettledGroup
from trainer_svc.losses import Aggregation, KlEstimator
from trainer_svc.microbatches import TrainSample, loss_count
from trainer_svc.policy import StepStats


class Passes(Protocol):
    """What is asked of the learner."""

    def prepare(self, samples: Sequence[TrainSample]) -> list[TrainSample]:
        """The same samples with what forward passes say of them."""

    def accumulate(self, samples: Sequence[TrainSample]) -> None:
        """Adds their gradients to the policy's next step."""

    def step(self, global_count: float) -> StepStats:
        """The policy's step."""

    def accumulate_values(self, samples: Sequence[TrainSample]) -> None:
        """Adds their gradients to the critic's next step."""

    def step_critic(self, global_count: float) -> CriticStats:
        """The critic's step."""


@dataclass(frozen=True)
class KlReward:
    """What the reward loses for leaving the reference: coefficient times the estimated KL of the tokens drawn."""

    estimator: KlEstimator
    coefficient: float

    def of(self, sample: TrainSample) -> Tensor:
        """(tokens,), float64, of a prepared sample."""
        assert sample.reference_logprobs is not None, f"sample {sample.identity} has no reference log-probs"
        drawn = torch.tensor(sample.behaviour_logprobs, dtype=torch.float64)
        return self.coefficient * self.estimator(drawn, sample.reference_logprobs.double())


@dataclass(frozen=True)
class Recipe:
    """What the settings make of a batch."""

    algorithm: Algorithm
    aggregation: Aggregation
    steps_per_batch: int = 1
    prepares: bool = False
    """Whether anything is computed of samples as they arrive."""
    kl_reward: KlReward | None = None
    kl_in_loss: bool = False
    """Then a sample without advantage has a gradient, too."""
    discount: float = 1.0
    trace: float = 1.0
    critic_warmup: int = 0
    """Batches at the start of a run in which the critic learns alone."""

    @property
    def streams(self) -> bool:
        """As `Algorithm.streams`."""
        return self.algorithm.streams(self.steps_per_batch)

    def group_samples(self, group: SettledGroup) -> list[TrainSample]:
        """The trained samples of a prepared group with the advantages that their group gives them."""
        assert self.algorithm.group_advantages is not None
        rewards = group.rewards
        if self.kl_reward is not None:
            penalties = [float(self.kl_reward.of(scored.sample).sum()) for scored in group.samples]
            rewards = [reward - penalty for reward, penalty in zip(rewards, penalties, strict=True)]
        advantages = self.algorithm.group_advantages(rewards)
        return [
            replace(scored.sample, advantage=advantage)
            for scored, advantage in zip(group.samples, advantages, strict=True)
            if scored.trained
        ]

    def batch_samples(self, groups: Sequence[SettledGroup]) -> list[TrainSample]:
        """The trained samples of prepared groups, a whole batch, with advantages of each token, and with returns.

        The reward of an answer is that of its last token. In what the advantages are normalised over, the order of the
        groups makes no difference but rounding.
        """
        scored = [one for group in groups for one in group.samples if one.trained]
        lengths = [len(one.sample.answer_token_ids) for one in scored]
        shape = len(scored), max(lengths)
        rewards, values = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
        written = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
        for row, (one, length) in enumerate(zip(scored, lengths, strict=True)):
            if self.kl_reward is not None:
                rewards[row, :length] -= self.kl_reward.of(one.sample)
            rewards[row, length - 1] += one.reward
            if one.sample.values is not None:
                values[row, :length] = one.sample.values
        raw, returns = generalised_advantages(rewards, values, discount=self.discount, trace=self.trace)
        advantages = normalised(raw, written)
        return [
            replace(one.sample, advantage=advantages[row, :length], returns=returns[row, :length])
            for row, (one, length) in enumerate(zip(scored, lengths, strict=True))
        ]

    def mini_batches(self, samples: Sequence[TrainSample]) -> list[list[TrainSample]]:
        """The samples of each optimizer step: groups in the order in which they were drawn, about as many a step."""
        order = sorted({sample.identity[1] for sample in samples})
        num_steps = min(self.steps_per_batch, len(order))
        step_of = {group: place * num_steps // len(order) for place, group in enumerate(order)}
        steps: list[list[TrainSample]] = [[] for _ in range(num_steps)]
        for sample in sorted(samples, key=lambda sample: sample.identity):
            steps[step_of[sample.identity[1]]].append(sample)
        return steps

    def worth_a_pass(self, samples: Sequence[TrainSample]) -> list[TrainSample]:
        """Those that have a gradient. They all count in what gradients are divided by: leaving some out must not make
        the others weigh more."""
        if self.kl_in_loss:
            return list(samples)
        return [sample for sample in samples if isinstance(sample.advantage, Tensor) or sample.advantage != 0.0]


@dataclass(frozen=True, slots=True)
class BatchSteps:
    """What became of a batch."""

    policy: Sequence[StepStats]
    """Empty while the critic warms up."""
    critic: Sequence[CriticStats]


class BatchTraining:
    """One batch, from its first samples to its last step."""

    def __init__(self, recipe: Recipe, learner: Passes, batch: int) -> None:
        """
        Args:
            batch: its index.
        """
        self._recipe = recipe
        self._learner = learner
        self._warms_up = recipe.algorithm.has_critic and batch < recipe.critic_warmup
        self._prepared: dict[tuple[int, int, int], TrainSample] = {}
        self._groups: list[SettledGroup] = []
        self._count = 0.0

    def enough(self, batch: BatchIntake, min_tokens: int) -> bool:
        """Whether so many tokens wait for a pass of one kind."""
        recipe = self._recipe
        return (recipe.prepares and batch.arrived_tokens >= min_tokens) or (
            recipe.streams and batch.settled_tokens >= min_tokens
        )

    def take(self, intake: Intake) -> None:
        """What can be done with what has come."""
        recipe = self._recipe
        if recipe.prepares and intake.arrived:
            self._prepared |= {sample.identity: sample for sample in self._learner.prepare(intake.arrived)}
        groups = [self._with_what_is_known(group) for group in intake.groups]
        if not recipe.streams:
            self._groups += groups
            return
        samples = [sample for group in groups for sample in recipe.group_samples(group)]
        self._count += loss_count(samples, recipe.aggregation)
        if worth_a_pass := recipe.worth_a_pass(samples):
            self._learner.accumulate(worth_a_pass)

    def finish(self) -> BatchSteps:
        """The steps, after everything was taken. At least one group must have been."""
        recipe = self._recipe
        if recipe.streams:
            return BatchSteps([self._learner.step(self._count)], [])
        if recipe.algorithm.group_advantages is not None:
            samples = [sample for group in self._groups for sample in recipe.group_samples(group)]
        else:
            samples = recipe.batch_samples(sorted(self._groups, key=lambda group: group.index))
        policy, critic = [], []
        for number, mini_batch in enumerate(recipe.mini_batches(samples)):
            if number > 0:
                mini_batch = [_of_another_version(sample) for sample in mini_batch]
            count = loss_count(mini_batch, recipe.aggregation)
            if not self._warms_up:
                self._learner.accumulate(recipe.worth_a_pass(mini_batch))
                policy.append(self._learner.step(count))
            if recipe.algorithm.has_critic:
                self._learner.accumulate_values(mini_batch)
                critic.append(self._learner.step_critic(count))
        return BatchSteps(policy, critic)

    def _with_what_is_known(self, group: SettledGroup) -> SettledGroup:
        if not self._recipe.prepares:
            return group
        return SettledGroup(
            tuple(replace(scored, sample=self._prepared.pop(scored.sample.identity)) for scored in group.samples)
        )


def _of_another_version(sample: TrainSample) -> TrainSample:
    """After a step the policy is not the one any more that drew a sample: where that one's log-probs were not kept,
    nothing can be said of how well they agree."""
    if sample.proximal_logprobs is not None:
        return sample
    return replace(sample, own_version=[False] * len(sample.own_version))
