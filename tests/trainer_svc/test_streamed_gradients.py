"""Through DeepSpeed, the gradient of a batch that came in pieces is that of the whole batch in one plain backward pass:
for every algorithm and aggregation, at every ZeRO stage, on one rank and on two, clipping included.

The optimizer's first moment is the gradient it was given when the moment does not decay (beta1 0), and weights that do
not learn (rate 0) have one gradient however many steps are made.
"""

import dataclasses
import functools
import itertools
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen2ForCausalLM

from tests.trainer_svc.small_model import small_model
from trainer_svc.algorithms import ALGORITHMS
from trainer_svc.batch_intake import Intake
from trainer_svc.batch_training import BatchTraining, KlReward, Recipe
from trainer_svc.critic import Critic, ValueModel
from trainer_svc.groups import ScoredSample, SettledGroup
from trainer_svc.learner import Learner
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
from trainer_svc.microbatches import MicroBatch, TrainSample, collate, loss_count
from trainer_svc.networks import Networks
from trainer_svc.packed_attention import take_packed_attention
from trainer_svc.policy import Policy, answer_logprobs
from trainer_svc.ranks import Ranks, join_ranks
from trainer_svc.reference import Reference
from trainer_svc.rows import RowCost
from trainer_svc.sharded_model import OptimizerRules, Sharding

pytestmark = pytest.mark.filterwarnings("ignore:`torch.distributed:FutureWarning")

_REPOSITORY = Path(__file__).parents[2]
_STAGES = (0, 1, 2, 3)
_TOLERANCE = 1e-5
_TEMPERATURE = 0.8
_VALUE_CLIP = 0.05
_MAX_TOKENS = 16
_IMPORTANCE_LIMIT = 2.0
_MAX_GRAD_NORM = 1e-3
"""Below the norms that occur here: clipping is part of what is compared."""
_RULES = OptimizerRules(0.0, 0, (0.0, 0.95), 0.0, _MAX_GRAD_NORM)


@dataclasses.dataclass(frozen=True)
class Case:
    """What a batch is trained with."""

    algorithm: str
    aggregation: str
    off_policy: str
    kl: str
    steps_per_batch: int

    @property
    def recipe(self) -> Recipe:
        return Recipe(
            ALGORITHMS[self.algorithm],
            aggregation_of(self.aggregation, _MAX_TOKENS),
            steps_per_batch=self.steps_per_batch,
            prepares=True,
            kl_reward=KlReward(KL_ESTIMATORS["k1"], 0.1) if self.kl == "reward" else None,
            kl_in_loss=self.kl == "loss",
            trace=0.9,
        )

    @property
    def objective(self) -> PolicyObjective:
        published = ALGORITHMS[self.algorithm]
        return PolicyObjective(
            SURROGATES[self.algorithm],
            ClipRange(published.clip_ratio, published.clip_ratio_high),
            OFF_POLICY[self.off_policy],
            _IMPORTANCE_LIMIT,
            KlLoss(KL_ESTIMATORS["k3"], 0.1) if self.kl == "loss" else None,
        )


def _cases() -> Iterator[Case]:
    """Every algorithm with every aggregation; the other choices in turns of their own."""
    corrections, kinds = list(OFF_POLICY), ("none", "reward", "loss")
    for number, (algorithm, aggregation) in enumerate(itertools.product(ALGORITHMS, AGGREGATIONS)):
        correction, kind = corrections[number % len(corrections)], kinds[(number + number // 3) % len(kinds)]
        yield Case(algorithm, aggregation, correction, kind, steps_per_batch=1 + (number // 2) % 2)


def _groups() -> list[SettledGroup]:
    """Four prompts with three answers each, drawn by a policy that is not far from the trained one."""
    draw, model = random.Random(3), small_model()
    groups = []
    for index in range(4):
        prompt = [draw.randrange(40) for _ in range(draw.randint(2, 5))]
        samples = []
        for number in range(3):
            length = draw.randint(1, 12)
            sample = TrainSample(
                identity=(0, index, number),
                prompt_token_ids=prompt,
                answer_token_ids=[draw.randrange(40) for _ in range(length)],
                behaviour_logprobs=[0.0] * length,
                advantage=0.0,
                own_version=[True] * length,
            )
            drawn = [value + draw.gauss(0, 0.3) for value in _logprobs(model, sample).tolist()]
            # The first group has no spread.
            reward = 1.0 if index == 0 else float(number % 2)
            samples.append(ScoredSample(dataclasses.replace(sample, behaviour_logprobs=drawn), reward, True))
        groups.append(SettledGroup(tuple(samples)))
    return groups


def _logprobs(model: Qwen2ForCausalLM, sample: TrainSample) -> Tensor:
    with torch.no_grad():
        return answer_logprobs(model, collate([[sample]], aggregation_of("token_mean", _MAX_TOKENS)), _TEMPERATURE)[0][
            0
        ]


def _values(model: ValueModel, micro_batch: MicroBatch) -> Tensor:
    return model(input_ids=micro_batch.token_ids, positions=micro_batch.targets - 1)


@dataclasses.dataclass
class Steps:
    """What the optimizers were given."""

    norms: list[float]
    """Before clipping, of all steps: the policy's, then the critic's."""
    last: list[dict[str, Tensor]]
    """Clipped gradients of the last step: the policy's, and the critic's where there is one."""


@functools.cache
def _in_one_pass(case: Case) -> Steps:
    """The whole of each mini-batch in one pass of plain PyTorch."""
    policy, reference, critic = small_model(), small_model(1), ValueModel(small_model())
    prepared = []
    for group in _groups():
        scored = []
        for one in group.samples:
            row = collate([[one.sample]], case.recipe.aggregation)
            with torch.no_grad():
                values = _values(critic, row)[0]
            known = {
                "reference_logprobs": _logprobs(reference, one.sample),
                "proximal_logprobs": _logprobs(policy, one.sample),
                "values": values,
            }
            scored.append(dataclasses.replace(one, sample=dataclasses.replace(one.sample, **known)))
        prepared.append(SettledGroup(tuple(scored)))
    recipe, has_critic = case.recipe, ALGORITHMS[case.algorithm].has_critic
    if recipe.algorithm.group_advantages is None:
        samples = recipe.batch_samples(prepared)
    else:
        samples = [sample for group in prepared for sample in recipe.group_samples(group)]
    norms: list[list[float]] = [[], []]
    last: list[dict[str, Tensor]] = []
    for mini_batch in recipe.mini_batches(samples):
        whole = collate([[sample] for sample in mini_batch], recipe.aggregation)
        losses: list[tuple[nn.Module, Tensor]] = [
            (policy, policy_loss(case.objective, *answer_logprobs(policy, whole, _TEMPERATURE), whole)[0])
        ]
        if has_critic:
            values = _values(critic, whole)
            losses.append((critic, value_loss(values, whole.values, whole.returns, whole.weights, clip=_VALUE_CLIP)[0]))
        last = []
        for kept, (network, loss) in zip(norms, losses, strict=False):
            network.zero_grad()
            (loss / loss_count(mini_batch, recipe.aggregation)).backward()
            kept.append(float(nn.utils.clip_grad_norm_(network.parameters(), _MAX_GRAD_NORM)))
            last.append({name: parameter.grad.clone() for name, parameter in network.named_parameters()})
    return Steps([*norms[0], *norms[1]], last)


def _networks(case: Case, zero_stage: int, *, packed: bool) -> Networks:
    sharding = Sharding(zero_stage, "float32")
    has_critic = ALGORITHMS[case.algorithm].has_critic
    actor, frozen, value_model = small_model(), small_model(1), small_model()
    for model in (actor, frozen, value_model) if packed else ():
        take_packed_attention(model)
    return Networks(
        Policy(actor, objective=case.objective, temperature=_TEMPERATURE, rules=_RULES, sharding=sharding),
        Reference(frozen, temperature=_TEMPERATURE, sharding=sharding),
        Critic(value_model, clip=_VALUE_CLIP, rules=_RULES, sharding=sharding) if has_critic else None,
        keeps_proximal=True,
    )


def _arrivals(draw: random.Random) -> list[Intake]:
    """Answers in any order; a group as soon as its last one is there; handed over now and then."""
    groups = _groups()
    waiting = [(group, scored.sample) for group in groups for scored in group.samples]
    draw.shuffle(waiting)
    left = {group.index: len(group.samples) for group in groups}
    intakes: list[Intake] = []
    arrived: list[TrainSample] = []
    settled: list[SettledGroup] = []
    for group, sample in waiting:
        arrived.append(sample)
        left[group.index] -= 1
        if left[group.index] == 0:
            settled.append(group)
        if draw.random() < 0.4:
            intakes.append(Intake(arrived, settled, False))
            arrived, settled = [], []
    return [*intakes, Intake(arrived, settled, True)]


def _gradients(networks: Networks) -> list[dict[str, Tensor]]:
    """Every rank calls it."""
    from deepspeed.utils import safe_get_full_optimizer_state

    found = []
    for network in (networks.policy, networks.critic):
        if network is None:
            continue
        engine = network._model._engine
        gradients = {}
        for name, parameter in engine.module.named_parameters():
            moment = safe_get_full_optimizer_state(parameter, "exp_avg")
            # At stage 0 the optimizer is PyTorch's own.
            gradients[name] = (engine.optimizer.state[parameter]["exp_avg"] if moment is None else moment).clone()
        found.append(gradients)
    return found


def _streamed(case: Case, zero_stage: int, ranks: Ranks) -> Steps:
    """The batch in an order and in pieces of its own, answers to a prompt sharing rows or not, rows packed or padded.
    Every rank calls it."""
    draw = random.Random(f"{case} {zero_stage} {ranks.world_size}")
    networks = _networks(case, zero_stage, packed=draw.random() < 0.5)
    learner = Learner(
        networks,
        ranks,
        aggregation=case.recipe.aggregation,
        micro_batch_tokens=draw.choice((20, 60, 150)),
        row_cost=draw.choice((None, RowCost(each_token=1.0, each_pair=0.0))),
    )
    norms: list[float] = []
    if ranks.rank == 0:
        training = BatchTraining(case.recipe, learner, 0)
        for intake in _arrivals(draw):
            training.take(intake)
        steps = training.finish()
        assert all(step.applied for step in (*steps.policy, *steps.critic))
        norms = [step.grad_norm for step in (*steps.policy, *steps.critic)]
        learner.end()
    else:
        learner.follow()
    last = _gradients(networks)
    networks.close()
    return Steps(norms, last)


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def _error(streamed: Steps, whole: Steps) -> float:
    """The largest relative one of all gradients' norms, and of the gradients themselves."""
    errors = [abs(mine / theirs - 1) for mine, theirs in zip(streamed.norms, whole.norms, strict=True)]
    for mine, theirs in zip(streamed.last, whole.last, strict=True):
        assert mine.keys() == theirs.keys()
        assert _norm(list(theirs.values())) == pytest.approx(_MAX_GRAD_NORM, rel=1e-3)
        errors.append(_norm([mine[name] - theirs[name] for name in theirs]) / _norm(list(theirs.values())))
    return max(errors)


def test_of_each_algorithm_the_pieces_have_the_gradient_of_the_whole(ranks: Ranks) -> None:
    for case in {case.algorithm: case for case in _cases()}.values():
        assert _error(_streamed(case, 2, ranks), _in_one_pass(case)) < _TOLERANCE, case


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", _STAGES)
def test_on_one_rank_the_pieces_have_the_gradient_of_the_whole(ranks: Ranks, zero_stage: int) -> None:
    for case in _cases():
        assert _error(_streamed(case, zero_stage, ranks), _in_one_pass(case)) < _TOLERANCE, case


def _two_ranks(errors: Path, zero_stage: int) -> None:
    """Run as a program, by two ranks."""
    with join_ranks(2, [sys.executable, __file__, *sys.argv[1:]], os.environ) as ranks:
        found = {}
        for case in _cases():
            streamed = _streamed(case, zero_stage, ranks)
            if ranks.rank == 0:
                found[str(case)] = _error(streamed, _in_one_pass(case))
        if ranks.rank == 0:
            errors.write_text(json.dumps(found))


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", _STAGES)
def test_on_two_ranks_the_pieces_have_the_gradient_of_the_whole(tmp_path: Path, zero_stage: int) -> None:
    errors = tmp_path / "errors.json"
    environment = {**os.environ, "PYTHONPATH": str(_REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(errors), str(zero_stage)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stderr
    found = json.loads(errors.read_text())
    assert len(found) == len(ALGORITHMS) * len(AGGREGATIONS)
    assert {case: error for case, error in found.items() if not error < _TOLERANCE} == {}


if __name__ == "__main__":
    _two_ranks(Path(sys.argv[1]), int(sys.argv[2]))
