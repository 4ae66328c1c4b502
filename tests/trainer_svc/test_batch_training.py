"""What is computed when, with a learner that is a table of logits in float64: any order and division of what comes has
the gradients of the whole batch at once."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from streamrl.identity import PURPOSE_TRAIN, BatchKey
from trainer_svc.advantages import generalised_advantages, normalised
from trainer_svc.algorithms import ALGORITHMS
from trainer_svc.batch_intake import BatchIntake, Intake
from trainer_svc.batch_training import BatchTraining, KlReward, Recipe
from trainer_svc.groups import ScoredSample, SettledGroup
from trainer_svc.losses import (
    AGGREGATIONS,
    KL_ESTIMATORS,
    OFF_POLICY,
    SURROGATES,
    ClipRange,
    KlLoss,
    PolicyObjective,
    aggregation_of,
    policy_loss,
    value_loss,
)
from trainer_svc.microbatches import MicroBatch, TrainSample, collate

VOCABULARY, LONGEST = 7, 5
_RATE = 0.1


def _logprobs(table: Tensor, micro_batch: MicroBatch) -> Tensor:
    """Of a policy that looks at nothing but the token's place in the row."""
    targets = micro_batch.token_ids[:, micro_batch.targets]
    rows = table[: targets.shape[1]].expand(*targets.shape, VOCABULARY)
    return torch.log_softmax(rows, -1).gather(-1, targets[..., None]).squeeze(-1)


class TableLearner:
    """Takes plain gradient steps, and keeps the gradients."""

    def __init__(self, seed: int, recipe: Recipe, objective: PolicyObjective) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table, self.reference = (
            torch.randn(LONGEST, VOCABULARY, dtype=torch.float64, generator=generator) for _ in range(2)
        )
        self.values = torch.randn(LONGEST, dtype=torch.float64, generator=generator)
        self.recipe, self.objective = recipe, objective
        self.gradients: list[Tensor] = []
        self._sum, self._value_sum = torch.zeros_like(self.table), torch.zeros_like(self.values)

    def prepare(self, samples: Any) -> list[TrainSample]:
        prepared = []
        for sample in samples:
            micro_batch = collate([[sample]], self.recipe.aggregation)
            prepared.append(
                replace(
                    sample,
                    reference_logprobs=_logprobs(self.reference, micro_batch)[0],
                    proximal_logprobs=_logprobs(self.table, micro_batch)[0],
                    values=self.values[: len(sample.answer_token_ids)].clone(),
                )
            )
        return prepared

    def accumulate(self, samples: Any) -> None:
        for sample in samples:
            table = self.table.clone().requires_grad_()
            micro_batch = collate([[sample]], self.recipe.aggregation)
            logprobs = _logprobs(table, micro_batch)
            policy_loss(self.objective, logprobs, torch.zeros_like(logprobs), micro_batch)[0].backward()
            self._sum += table.grad

    def step(self, global_count: float) -> Any:
        self.gradients.append(self._sum / global_count)
        self.table = self.table - _RATE * self.gradients[-1]
        self._sum = torch.zeros_like(self.table)

    def accumulate_values(self, samples: Any) -> None:
        for sample in samples:
            parameters = self.values.clone().requires_grad_()
            batch = collate([[sample]], self.recipe.aggregation)
            values = parameters[None, : len(sample.answer_token_ids)]
            value_loss(values, batch.values, batch.returns, batch.weights, clip=0.05)[0].backward()
            self._value_sum += parameters.grad

    def step_critic(self, global_count: float) -> Any:
        self.gradients.append(self._value_sum / global_count)
        self.values = self.values - _RATE * self.gradients[-1]
        self._value_sum = torch.zeros_like(self.values)


@dataclass(frozen=True)
class Case:
    recipe: Recipe
    objective: PolicyObjective
    groups: list[SettledGroup]
    intakes: list[Intake]


@pytest.fixture(autouse=True, scope="module")
def _in_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@st.composite
def _cases(draw, algorithm: str) -> Case:
    kl = draw(st.sampled_from(["none", "reward", "loss"]))
    estimator = KL_ESTIMATORS[draw(st.sampled_from(sorted(KL_ESTIMATORS)))]
    recipe = Recipe(
        algorithm=ALGORITHMS[algorithm],
        aggregation=aggregation_of(draw(st.sampled_from(AGGREGATIONS)), 16),
        steps_per_batch=draw(st.integers(1, 3)),
        prepares=True,
        kl_reward=KlReward(estimator, 0.2) if kl == "reward" else None,
        kl_in_loss=kl == "loss",
        discount=draw(st.sampled_from([0.9, 1.0])),
        trace=draw(st.sampled_from([0.5, 1.0])),
    )
    objective = PolicyObjective(
        SURROGATES[algorithm],
        ClipRange(0.2, 0.3),
        OFF_POLICY[draw(st.sampled_from(sorted(OFF_POLICY)))],
        2.0,
        KlLoss(estimator, 0.2) if kl == "loss" else None,
    )
    random = draw(st.randoms(use_true_random=False))
    groups = [_group(index, random) for index in range(draw(st.integers(1, 4)))]
    return Case(recipe, objective, groups, _arrivals(groups, random))


def _group(index: int, random: Any) -> SettledGroup:
    samples = []
    for number in range(random.randint(2, 3)):
        length = random.randint(1, LONGEST)
        sample = TrainSample(
            identity=(0, index, number),
            prompt_token_ids=[1],
            answer_token_ids=[random.randrange(VOCABULARY) for _ in range(length)],
            behaviour_logprobs=[-random.uniform(0.5, 3) for _ in range(length)],
            advantage=0.0,
            own_version=[True] * length,
        )
        samples.append(ScoredSample(sample, float(random.randint(0, 1)), trained=number == 0 or random.random() < 0.8))
    return SettledGroup(tuple(samples))


def _arrivals(groups: list[SettledGroup], random: Any) -> list[Intake]:
    """Answers in any order; a group as soon as its last one is there; handed over now and then."""
    waiting = [(group, scored.sample) for group in groups for scored in group.samples]
    random.shuffle(waiting)
    left = {group.index: len(group.samples) for group in groups}
    intakes, arrived, settled = [], [], []
    for group, sample in waiting:
        arrived.append(sample)
        left[group.index] -= 1
        if left[group.index] == 0:
            settled.append(group)
        if random.random() < 0.4:
            intakes.append(Intake(arrived, settled, False))
            arrived, settled = [], []
    return [*intakes, Intake(arrived, settled, True)]


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
@settings(max_examples=20)
@given(data=st.data())
def test_any_order_of_arrival_has_the_steps_of_the_batch_at_once(algorithm: str, data: Any) -> None:
    case = data.draw(_cases(algorithm))
    gradients = []
    at_once = [Intake([scored.sample for group in case.groups for scored in group.samples], case.groups, True)]
    for intakes in (case.intakes, at_once):
        learner = TableLearner(0, case.recipe, case.objective)
        training = BatchTraining(case.recipe, learner, 0)
        for intake in intakes:
            training.take(intake)
        training.finish()
        gradients.append(learner.gradients)
    assert len(gradients[0]) == len(gradients[1]) > 0
    for streamed, whole in zip(*gradients, strict=True):
        torch.testing.assert_close(streamed, whole, rtol=0, atol=1e-9)


def _one_group(rewards: list[float], lengths: list[int]) -> SettledGroup:
    def sample(number: int, length: int) -> TrainSample:
        return TrainSample((0, 0, number), [1], [2] * length, [-1.0] * length, 0.0, [True] * length)

    samples = (sample(number, length) for number, length in enumerate(lengths))
    return SettledGroup(tuple(ScoredSample(one, reward, True) for one, reward in zip(samples, rewards, strict=True)))


def _recipe(algorithm: str, **changes: Any) -> Recipe:
    return Recipe(ALGORITHMS[algorithm], aggregation_of("token_mean", 16), **changes)


def test_the_kl_in_the_reward_of_a_compared_answer_is_that_of_its_tokens_together() -> None:
    group = _one_group([1.0, 1.0], [2, 1])
    samples = [
        replace(scored.sample, reference_logprobs=torch.full((len(scored.sample.answer_token_ids),), -1.5))
        for scored in group.samples
    ]
    group = SettledGroup(tuple(replace(s, sample=o) for s, o in zip(group.samples, samples, strict=True)))
    recipe = _recipe("rloo", kl_reward=KlReward(KL_ESTIMATORS["k1"], 0.1))
    # 1 - 0.1 * 2 * 0.5 and 1 - 0.1 * 0.5
    assert [sample.advantage for sample in recipe.group_samples(group)] == pytest.approx([-0.05, 0.05])


def test_reinforce_pp_normalises_returns_over_the_tokens_of_the_batch() -> None:
    group = _one_group([1.0, 0.0], [1, 3])
    first, second = _recipe("reinforce_pp").batch_samples([group])
    # Mean 1/4 and variance 3/16 over four tokens.
    assert first.advantage.tolist() == pytest.approx([0.75 / (3 / 16) ** 0.5])
    assert second.advantage.tolist() == pytest.approx([-0.25 / (3 / 16) ** 0.5] * 3)


def test_ppo_takes_values_into_account_and_fits_the_critic_to_returns() -> None:
    group = _one_group([1.0], [3])
    values = torch.tensor([0.2, 0.5, 0.9])
    group = SettledGroup((replace(group.samples[0], sample=replace(group.samples[0].sample, values=values)),))
    (sample,) = _recipe("ppo", trace=0.5).batch_samples([group])
    rewards = torch.tensor([[0.0, 0.0, 1.0]])
    advantages, returns = generalised_advantages(rewards, values[None], discount=1.0, trace=0.5)
    assert sample.returns.tolist() == pytest.approx(returns[0].tolist())
    assert sample.advantage.tolist() == pytest.approx(normalised(advantages, rewards >= 0)[0].tolist())


class Calls:
    """A learner that only notes what it is asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def prepare(self, samples: Any) -> Any:
        self.calls.append(("prepare", len(samples)))
        return list(samples)

    def __getattr__(self, name: str) -> Any:
        return lambda what: self.calls.append((name, what if isinstance(what, float) else len(what)))


def test_the_critic_warms_up_alone() -> None:
    group = _one_group([1.0, 0.0], [1, 2])
    for batch, expected in (
        (0, [("accumulate_values", 2), ("step_critic", 3.0)]),
        (1, [("accumulate", 2), ("step", 3.0), ("accumulate_values", 2), ("step_critic", 3.0)]),
    ):
        learner = Calls()
        training = BatchTraining(_recipe("ppo", critic_warmup=1), learner, batch)
        training.take(Intake([], [group], True))
        training.finish()
        assert learner.calls == expected


def test_groups_without_spread_need_no_pass_but_count() -> None:
    learner = Calls()
    training = BatchTraining(_recipe("grpo"), learner, 0)
    training.take(Intake([], [_one_group([1.0, 1.0], [4, 4])], False))
    training.take(Intake([], [_one_group([1.0, 0.0], [1, 2])], True))
    training.finish()
    assert learner.calls == [("accumulate", 2), ("step", 11.0)]
    learner = Calls()
    BatchTraining(_recipe("grpo", kl_in_loss=True), learner, 0).take(Intake([], [_one_group([1.0, 1.0], [4, 4])], True))
    assert learner.calls == [("accumulate", 2)]


def test_mini_batches_are_groups_in_the_order_in_which_they_were_drawn() -> None:
    samples = [
        replace(_one_group([0.0], [1]).samples[0].sample, identity=(0, group, number))
        for number in (1, 0)
        for group in (7, 2, 0, 5, 3)
    ]
    steps = _recipe("grpo", steps_per_batch=2).mini_batches(samples)
    assert [sorted({sample.identity[1] for sample in step}) for step in steps] == [[0, 2, 3], [5, 7]]
    assert [len(step) for step in _recipe("grpo", steps_per_batch=9).mini_batches(samples)] == [2] * 5


@pytest.mark.parametrize("keeps_proximal", [False, True])
def test_after_a_step_only_kept_log_probs_say_how_well_trainer_and_generator_agree(keeps_proximal: bool) -> None:
    groups = []
    for index in (0, 1):
        (scored,) = _one_group([1.0], [2]).samples
        kept = torch.tensor([-1.0, -1.0]) if keeps_proximal else None
        sample = replace(scored.sample, identity=(0, index, 0), proximal_logprobs=kept)
        groups.append(SettledGroup((replace(scored, sample=sample, reward=float(index)),)))
    learner = Calls()
    accumulated: list[TrainSample] = []
    learner.accumulate = accumulated.extend
    training = BatchTraining(_recipe("reinforce_pp", steps_per_batch=2), learner, 0)
    training.take(Intake([], groups, True))
    training.finish()
    assert [sample.own_version for sample in accumulated] == [[True, True], [keeps_proximal] * 2]


def test_enough_is_what_can_be_worked_on() -> None:
    batch = BatchIntake(BatchKey(PURPOSE_TRAIN, 0), [], 2)
    batch.arrived = [scored.sample for scored in _one_group([0.0, 0.0], [3, 4]).samples]
    batch.groups = [_one_group([1.0, 0.0], [1, 2]), _one_group([1.0, 1.0], [9, 9])]
    expectations = {("grpo", False): 5, ("grpo", True): 9, ("ppo", True): 9, ("reinforce_pp", False): 0}
    for (algorithm, prepares), tokens in expectations.items():
        training = BatchTraining(_recipe(algorithm, prepares=prepares), Calls(), 0)
        assert training.enough(batch, 1) == (tokens > 0)
        assert tokens == 0 or training.enough(batch, tokens)
        assert not training.enough(batch, tokens + 1)
