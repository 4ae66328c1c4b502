"""Whole batches of PPO with a reference on DeepSpeed, on one rank and on two; what they should do is written here in
plain PyTorch."""

import dataclasses
import math
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

from tests.trainer_svc.small_model import small_model
from trainer_svc.algorithms import ALGORITHMS
from trainer_svc.batch_intake import Intake
from trainer_svc.batch_training import BatchSteps, BatchTraining, KlReward, Recipe
from trainer_svc.checkpoint import load_checkpoint, save_checkpoint
from trainer_svc.critic import Critic, ValueModel
from trainer_svc.groups import ScoredSample, SettledGroup
from trainer_svc.learner import Learner
from trainer_svc.losses import KL_ESTIMATORS, OFF_POLICY, SURROGATES, ClipRange, PolicyObjective, aggregation_of
from trainer_svc.microbatches import TrainSample
from trainer_svc.networks import Networks
from trainer_svc.optimizer import OptimizerRules
from trainer_svc.packed_attention import take_packed_attention
from trainer_svc.policy import Policy
from trainer_svc.ranks import Ranks, join_ranks
from trainer_svc.reference import Reference
from trainer_svc.rows import RowCost
from trainer_svc.sharded_model import Sharding

pytestmark = pytest.mark.filterwarnings("ignore:`torch.distributed:FutureWarning")

_REPOSITORY = Path(__file__).parents[2]
_AGGREGATION = aggregation_of("token_mean", 16)
_TEMPERATURE = 0.8
_VALUE_CLIP = 0.05
_KL = KlReward(KL_ESTIMATORS["k1"], 0.1)
_RECIPE = Recipe(ALGORITHMS["ppo"], _AGGREGATION, steps_per_batch=2, prepares=True, kl_reward=_KL, trace=0.9)
_LEARNING_RATE = 1e-4
"""Low: AdamW makes steps of full length out of gradients that are nothing but rounding."""
_RULES = OptimizerRules(_LEARNING_RATE, 0, (0.9, 0.95), 0.0, max_grad_norm=0.5)
Plain = tuple[dict[str, Tensor], list[float]]


def _groups(seed: int) -> list[SettledGroup]:
    draw = random.Random(seed)
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
                behaviour_logprobs=[-draw.uniform(2, 5) for _ in range(length)],
                advantage=0.0,
                own_version=[True] * length,
            )
            samples.append(ScoredSample(sample, draw.choice([0.0, 1.0]), True))
        groups.append(SettledGroup(tuple(samples)))
    return groups


def _networks(zero_stage: int, *, packed: bool = False) -> Networks:
    sharding = Sharding(zero_stage, "float32")
    objective = PolicyObjective(SURROGATES["ppo"], ClipRange(0.2, 0.2), OFF_POLICY["truncated"], 2.0)
    actor, frozen, value_model = small_model(), small_model(1), small_model()
    for model in (actor, frozen, value_model) if packed else ():
        take_packed_attention(model)
    return Networks(
        Policy(actor, objective=objective, temperature=_TEMPERATURE, rules=_RULES, sharding=sharding),
        Reference(frozen, temperature=_TEMPERATURE, sharding=sharding, offload=zero_stage in (1, 3)),
        Critic(value_model, clip=_VALUE_CLIP, rules=_RULES, sharding=sharding),
        keeps_proximal=True,
    )


def _learner(networks: Networks, ranks: Ranks) -> Learner:
    # Prompts cost as much as answers and attention nothing: answers share rows.
    cost = RowCost(each_token=1.0, each_pair=0.0)
    return Learner(networks, ranks, aggregation=_AGGREGATION, micro_batch_tokens=60, row_cost=cost)


def _train(learner: Learner, groups: list[SettledGroup]) -> BatchSteps:
    """In two parts, as samples come."""
    training = BatchTraining(_RECIPE, learner, 0)
    for part, complete in ((groups[2:], False), (groups[:2], True)):
        training.take(Intake([scored.sample for group in part for scored in group.samples], part, complete))
    return training.finish()


def _weights(networks: Networks) -> dict[str, Tensor]:
    assert networks.critic is not None
    critic = {f"critic.{name}": tensor for name, tensor in networks.critic.weights()}
    return dict(networks.policy.weights()) | critic


def _plain_logprobs(model: Qwen2ForCausalLM, sample: TrainSample) -> Tensor:
    token_ids = torch.tensor([[*sample.prompt_token_ids, *sample.answer_token_ids]])
    logits = model(input_ids=token_ids).logits[0, len(sample.prompt_token_ids) - 1 : -1] / _TEMPERATURE
    return torch.log_softmax(logits, dim=-1).gather(-1, torch.tensor(sample.answer_token_ids)[:, None]).squeeze(-1)


def _plain_values(model: ValueModel, sample: TrainSample) -> Tensor:
    token_ids = torch.tensor([[*sample.prompt_token_ids, *sample.answer_token_ids]])
    hidden = model.body(input_ids=token_ids).last_hidden_state[0, len(sample.prompt_token_ids) - 1 : -1]
    return hidden @ model.value_head.weight[0] + model.value_head.bias


def _plain_batches(batches: list[list[SettledGroup]]) -> Plain:
    """Weights after these batches, each of two steps on two groups, one sample at a time; and the gradient norms of all
    steps, the policy's and the critic's in turn."""
    policy, reference, critic = small_model(), small_model(1), ValueModel(small_model())
    optimizers = [
        torch.optim.AdamW(network.parameters(), _LEARNING_RATE, (0.9, 0.95), weight_decay=0)
        for network in (policy, critic)
    ]
    grad_norms = []
    for groups in batches:
        prepared = []
        for group in groups:
            scored = []
            for one in group.samples:
                with torch.no_grad():
                    known = {
                        "reference_logprobs": _plain_logprobs(reference, one.sample),
                        "proximal_logprobs": _plain_logprobs(policy, one.sample),
                        "values": _plain_values(critic, one.sample),
                    }
                scored.append(dataclasses.replace(one, sample=dataclasses.replace(one.sample, **known)))
            prepared.append(SettledGroup(tuple(scored)))
        samples = _RECIPE.batch_samples(prepared)
        for half in ((0, 1), (2, 3)):
            mine = [sample for sample in samples if sample.identity[1] in half]
            num_tokens = sum(len(sample.answer_token_ids) for sample in mine)
            loss, value_loss = torch.zeros(()), torch.zeros(())
            for sample in mine:
                proximal, advantage = sample.proximal_logprobs, sample.advantage.float()
                ratio = (_plain_logprobs(policy, sample) - proximal).exp()
                weight = (proximal - torch.tensor(sample.behaviour_logprobs)).exp().clamp_max(2.0)
                loss = loss - (weight * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)).sum()
                values, returns = _plain_values(critic, sample), sample.returns.float()
                near = sample.values + (values - sample.values).clamp(-_VALUE_CLIP, _VALUE_CLIP)
                value_loss = value_loss + torch.maximum((values - returns) ** 2, (near - returns) ** 2).sum() / 2
            for total, network, optimizer in ((loss, policy, optimizers[0]), (value_loss, critic, optimizers[1])):
                (total / num_tokens).backward()
                grad_norms.append(float(torch.nn.utils.clip_grad_norm_(network.parameters(), 0.5)))
                optimizer.step()
                optimizer.zero_grad()
    critic_weights = {f"critic.{name}": parameter.detach() for name, parameter in critic.named_parameters()}
    return {name: parameter.detach() for name, parameter in policy.named_parameters()} | critic_weights, grad_norms


def _max_difference(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert set(weights) == set(expected)
    return max(float((weights[name] - expected[name]).abs().max()) for name in expected)


@pytest.fixture(scope="module")
def plain() -> Plain:
    return _plain_batches([_groups(0), _groups(1)])


@pytest.mark.parametrize(
    ("zero_stage", "packed"),
    [(0, False), (3, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((3, False), (0, True)))],
)
def test_batches_of_ppo_are_those_of_plain_pytorch(ranks: Ranks, plain: Plain, zero_stage: int, packed: bool) -> None:
    networks = _networks(zero_stage, packed=packed)
    learner = _learner(networks, ranks)
    first, steps = _train(learner, _groups(0)), _train(learner, _groups(1))
    weights, grad_norms = plain
    assert _max_difference(_weights(networks), weights) < 1e-5
    in_turn = [both for batch in (first, steps) for both in zip(batch.policy, batch.critic, strict=True)]
    assert [step.grad_norm for both in in_turn for step in both] == pytest.approx(grad_norms, rel=1e-4)
    assert [step.applied for step in (*steps.policy, *steps.critic)] == [True] * 4
    assert all(step.reference_kl is not None and step.reference_kl > 0 for step in steps.policy)
    assert all(math.isfinite(step.explained_variance) and step.return_mean != 0 for step in steps.critic)
    networks.close()


def test_what_is_prepared_is_of_each_sample_alone(ranks: Ranks) -> None:
    networks = _networks(0)
    samples = [scored.sample for group in _groups(0) for scored in group.samples]
    prepared = {sample.identity: sample for sample in _learner(networks, ranks).prepare(samples)}
    assert set(prepared) == {sample.identity for sample in samples}
    for sample in prepared.values():
        with torch.no_grad():
            for mine, model in ((sample.reference_logprobs, small_model(1)), (sample.proximal_logprobs, small_model())):
                torch.testing.assert_close(mine, _plain_logprobs(model, sample), rtol=0, atol=1e-5)
        assert sample.values is not None and len(sample.values) == len(sample.answer_token_ids)
    networks.close()


def _two_ranks(folder: Path, zero_stages: Sequence[int]) -> None:
    """Run as a program, by two ranks."""
    with join_ranks(2, [sys.executable, __file__, *sys.argv[1:]], os.environ) as ranks:
        for zero_stage in zero_stages:
            networks = _networks(zero_stage)
            learner = _learner(networks, ranks)
            checkpoints = folder / f"stage-{zero_stage}"
            if ranks.rank == 0:
                _train(learner, _groups(0))
                learner.save(checkpoints, attempt=1, iteration=1, state={}, keep=1)
                _train(learner, _groups(1))
                learner.end()
            else:
                learner.follow()
            weights = _weights(networks)
            networks.close()
            resumed = _networks(zero_stage)
            load_checkpoint(checkpoints / "attempt-0001-iteration-000001", saved=resumed, ranks=ranks)
            learner = _learner(resumed, ranks)
            if ranks.rank == 0:
                _train(learner, _groups(1))
                learner.end()
            else:
                learner.follow()
            resumed_weights = _weights(resumed)
            resumed.close()
            if ranks.rank == 0:
                assert _max_difference(resumed_weights, weights) == 0
                safetensors.torch.save_file(weights, folder / f"weights-{zero_stage}.safetensors")


# Two ranks are for every day in test_trainer.py.
@pytest.mark.slow
@pytest.mark.parametrize("zero_stages", [(3,), (0, 1, 2)])
def test_two_ranks_train_policy_and_critic_like_one_and_resume_where_they_were(
    tmp_path: Path, plain: Plain, zero_stages: tuple[int, ...]
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(_REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(tmp_path), *map(str, zero_stages)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    for zero_stage in zero_stages:
        assert (
            _max_difference(safetensors.torch.load_file(tmp_path / f"weights-{zero_stage}.safetensors"), plain[0])
            < 1e-5
        )


def test_a_critic_begins_anew_where_the_checkpoint_has_none(ranks: Ranks, tmp_path: Path) -> None:
    with_critic = _networks(0)
    without = Networks(with_critic.policy)
    checkpoint = save_checkpoint(tmp_path, attempt=1, iteration=1, saved=without, state={}, keep=1, ranks=ranks)
    before = _weights(with_critic)
    load_checkpoint(checkpoint, saved=with_critic, ranks=ranks)
    assert _max_difference(_weights(with_critic), before) == 0
    with_critic.close()


def test_in_bfloat16_values_and_reference_log_probs_are_float32(ranks: Ranks) -> None:
    sharding = Sharding(0, "bfloat16")
    critic = Critic(small_model(), clip=math.inf, rules=_RULES, sharding=sharding)
    reference = Reference(small_model(1), temperature=_TEMPERATURE, sharding=sharding)
    networks = Networks(_networks(0).policy, reference, critic)
    for sample in _learner(networks, ranks).prepare([scored.sample for scored in _groups(0)[0].samples]):
        assert sample.values is not None and sample.values.dtype == torch.float32
        assert sample.reference_logprobs is not None and sample.proximal_logprobs is None
        with torch.no_grad():
            expected = _plain_logprobs(small_model(1), sample)
        # Eight bits of every weight and activation.
        torch.testing.assert_close(sample.reference_logprobs, expected, rtol=0.05, atol=0.1)
    networks.close()


if __name__ == "__main__":
    _two_ranks(Path(sys.argv[1]), [int(stage) for stage in sys.argv[2:]])
