"""Adapters and offloading on DeepSpeed, on one rank and on two; what they should do is here in plain PyTorch."""

import dataclasses
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

from streamrl.adapters import merged_tensors
from tests.trainer_svc.small_model import small_model
from trainer_svc.adapters import LoraRules, add_adapters, published_tensors
from trainer_svc.checkpoint import load_checkpoint, save_checkpoint
from trainer_svc.losses import OFF_POLICY, SURROGATES, ClipRange, PolicyObjective, aggregation_of
from trainer_svc.microbatches import TrainSample, collate, cut, deal, empty_micro_batch, loss_count
from trainer_svc.optimizer import OptimizerRules
from trainer_svc.policy import Policy, StepStats
from trainer_svc.ranks import Ranks, join_ranks
from trainer_svc.reference import PolicyWithoutAdapters, Reference
from trainer_svc.sharded_model import Sharding

pytestmark = pytest.mark.filterwarnings("ignore:`torch.distributed:FutureWarning")

_REPOSITORY = Path(__file__).parents[2]
_AGGREGATION = aggregation_of("token_mean", 16)
_LORA = LoraRules(rank=4, alpha=8.0)
_RATE = 1e-2
_MAX_GRAD_NORM = 0.05
_STAGES = (0, 1, 2, 3)
_OTHERS = [(0, "float32"), (1, "bfloat16"), (2, "float32"), (1, "float32"), (2, "bfloat16"), (3, "float32")]
_KINDS = [
    (3, "bfloat16"),
    *(pytest.param(stage, dtype, marks=pytest.mark.slow) for stage, dtype in _OTHERS),
]


def _model(lora: LoraRules | None = _LORA) -> Qwen2ForCausalLM:
    model = small_model(num_key_value_heads=1)
    if lora is not None:
        add_adapters(model, lora)
    return model


def _policy(model: Qwen2ForCausalLM, zero_stage: int, dtype: str = "float32", *, offload: bool = False) -> Policy:
    return Policy(
        model,
        objective=PolicyObjective(SURROGATES["grpo"], ClipRange(0.2, 0.2), OFF_POLICY["none"], 2.0),
        temperature=1.0,
        rules=OptimizerRules(_RATE, 0, (0.9, 0.95), 0.1, _MAX_GRAD_NORM),
        sharding=Sharding(zero_stage, dtype, offload_optimizer=offload),
    )


def _samples(seed: int) -> list[TrainSample]:
    draw = random.Random(seed)
    samples = []
    for index in range(9):
        length = draw.randint(1, 16)
        sample = TrainSample(
            identity=(0, index, 0),
            prompt_token_ids=[draw.randrange(40) for _ in range(draw.randint(1, 4))],
            answer_token_ids=[draw.randrange(40) for _ in range(length)],
            behaviour_logprobs=[-draw.uniform(2, 5) for _ in range(length)],
            advantage=draw.gauss(0, 1),
            own_version=[True] * length,
        )
        samples.append(sample)
    return samples


def _step(policy: Policy, seed: int, ranks: Ranks) -> StepStats:
    parts = cut(_samples(seed), 60, ranks.world_size)
    micro_batches = [collate([[sample] for sample in part], _AGGREGATION) for part in parts]
    for dealt in deal(micro_batches, ranks.world_size, empty_micro_batch()):
        policy.accumulate(dealt[ranks.rank])
    return policy.step(loss_count(_samples(seed), _AGGREGATION))


def _plain_weights(num_steps: int) -> dict[str, Tensor]:
    """Merged weights after steps on seeds 0, 1, …, of a loop that anyone would write."""
    model = _model()
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    for seed in range(num_steps):
        loss = torch.zeros(())
        for sample in _samples(seed):
            token_ids = torch.tensor([[*sample.prompt_token_ids, *sample.answer_token_ids]])
            logits = model(input_ids=token_ids).logits[0, len(sample.prompt_token_ids) - 1 : -1]
            answer = torch.tensor(sample.answer_token_ids)[:, None]
            loss = loss - sample.advantage * torch.log_softmax(logits, dim=-1).gather(-1, answer).sum()
        (loss / loss_count(_samples(seed), _AGGREGATION)).backward()
        torch.nn.utils.clip_grad_norm_(learning, _MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return {tensor.name: tensor.value().clone() for tensor in published_tensors(model)}


def _max_difference(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert list(weights) == list(expected)
    return max(float((weights[name].float() - expected[name].float()).abs().max()) for name in expected)


@pytest.mark.parametrize("zero_stage", _STAGES)
def test_adapters_learn_as_in_plain_pytorch_and_are_published_merged(ranks, zero_stage):
    initial = {name: parameter.detach().clone() for name, parameter in _model(None).named_parameters()}
    policy = _policy(_model(), zero_stage)
    assert _max_difference(dict(policy.weights()), initial) == 0
    _step(policy, 0, ranks)
    _step(policy, 1, ranks)
    weights = dict(policy.weights())
    frozen, adapters = dict(policy.weights("frozen")), dict(policy.weights("adapters"))
    policy.close()
    assert _max_difference(frozen, initial) == 0
    assert len(adapters) == 2 * 7 * 2
    made = dict(merged_tensors(frozen.items(), adapters.items(), 2.0, torch.device("cpu")))
    assert _max_difference(made, weights) < 1e-6
    assert _max_difference(weights, _plain_weights(2)) < 2e-5
    assert _max_difference(weights, initial) > 1e-3
    for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"):
        assert torch.equal(weights[name], initial[name])


@pytest.mark.parametrize(
    ("zero_stage", "dtype"),
    [(3, "float32"), *(pytest.param(*kind, marks=pytest.mark.slow) for kind in ((0, "float32"), (2, "bfloat16")))],
)
def test_a_policy_without_its_adapters_is_the_reference(ranks, zero_stage, dtype):
    """And asking it leaves no trace in the steps."""
    weights = []
    micro_batch = collate([[sample] for sample in _samples(5)], _AGGREGATION)
    for asked in (False, True):
        policy = _policy(_model(), zero_stage, dtype)
        reference = PolicyWithoutAdapters(policy)
        initial = policy.answer_logprobs(micro_batch)
        for seed in range(2):
            if asked:
                assert torch.equal(reference.answer_logprobs(micro_batch), initial)
            _step(policy, seed, ranks)
        assert not torch.equal(policy.answer_logprobs(micro_batch), initial)
        weights.append(dict(policy.weights()))
        policy.close()
    assert _max_difference(*weights) == 0


@pytest.mark.parametrize(("zero_stage", "dtype"), _KINDS)
def test_a_checkpoint_has_the_adapters_alone_and_the_rest_comes_from_the_model(ranks, tmp_path, zero_stage, dtype):
    policy = _policy(_model(), zero_stage, dtype)
    _step(policy, 0, ranks)
    checkpoint = save_checkpoint(tmp_path, attempt=1, iteration=1, saved=policy, state={}, keep=1, ranks=ranks)
    stats = _step(policy, 1, ranks)
    weights = dict(policy.weights())
    policy.close()
    saved = torch.load(next(checkpoint.rglob("*model_states.pt")), weights_only=False)
    assert saved["module"]
    assert all("lora_" in name for name in saved["module"])
    torch.manual_seed(7)
    resumed = _policy(_model(), zero_stage, dtype)
    load_checkpoint(checkpoint, saved=resumed, ranks=ranks)
    assert _step(resumed, 1, ranks) == stats
    assert _max_difference(dict(resumed.weights()), weights) == 0
    resumed.close()


def test_a_checkpoint_of_another_model_is_refused(ranks, tmp_path):
    policy = _policy(_model(), 0)
    checkpoint = save_checkpoint(tmp_path, attempt=1, iteration=1, saved=policy, state={}, keep=1, ranks=ranks)
    policy.close()
    other = _policy(_model(dataclasses.replace(_LORA, targets=("q_proj",))), 0)
    with pytest.raises(ValueError, match="of another model"):
        load_checkpoint(checkpoint, saved=other, ranks=ranks)
    other.close()


@pytest.mark.parametrize(("zero_stage", "dtype"), _KINDS)
def test_an_optimizer_in_host_memory_makes_the_same_steps(ranks, tmp_path, zero_stage, dtype):
    weights = []
    for offload in (False, True):
        policy = _policy(_model(None), zero_stage, dtype, offload=offload)
        _step(policy, 0, ranks)
        if offload:
            moments = list(policy._model._optimizer_tensors())
            assert moments
            assert all(tensor.untyped_storage().nbytes() == 0 for tensor in moments)
        folder = tmp_path / str(offload)
        checkpoint = save_checkpoint(folder, attempt=1, iteration=1, saved=policy, state={}, keep=1, ranks=ranks)
        _step(policy, 1, ranks)
        load_checkpoint(checkpoint, saved=policy, ranks=ranks)
        _step(policy, 2, ranks)
        weights.append(dict(policy.weights()))
        policy.close()
    assert _max_difference(*weights) == 0


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_a_reference_in_host_memory_says_the_same_when_it_is_brought_in(ranks, zero_stage):
    micro_batch = collate([[sample] for sample in _samples(0)], _AGGREGATION)
    sharding = Sharding(zero_stage, "float32")
    there = Reference(_model(None), temperature=1.0, sharding=sharding)
    expected = there.answer_logprobs(micro_batch)
    moved = Reference(_model(None), temperature=1.0, sharding=sharding, offload=True)
    for _ in range(2):
        moved.bring_in()
        assert torch.equal(moved.answer_logprobs(micro_batch), expected)
        assert torch.equal(moved.answer_logprobs(micro_batch), expected)
        moved.put_out()
    for reference in (there, moved):
        reference.close()


def _two_ranks(folder: Path) -> None:
    """Run as a program, by two ranks."""
    with join_ranks(2, [sys.executable, __file__, str(folder)], os.environ) as ranks:
        for zero_stage in (2, 3):
            policy = _policy(_model(), zero_stage, offload=True)
            _step(policy, 0, ranks)
            where = folder / str(zero_stage)
            checkpoint = save_checkpoint(where, attempt=1, iteration=1, saved=policy, state={}, keep=1, ranks=ranks)
            policy.close()
            resumed = _policy(_model(), zero_stage, offload=True)
            load_checkpoint(checkpoint, saved=resumed, ranks=ranks)
            _step(resumed, 1, ranks)
            weights = dict(resumed.weights())
            resumed.close()
            if ranks.rank == 0:
                assert _max_difference(weights, _plain_weights(2)) < 2e-5
                (folder / f"done-{zero_stage}").touch()


@pytest.mark.slow
def test_two_ranks_with_adapters_and_their_optimizer_in_host_memory_resume_and_step_like_one(tmp_path):
    command = [sys.executable, __file__, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(_REPOSITORY), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "done-2").exists()
    assert (tmp_path / "done-3").exists()


if __name__ == "__main__":
    _two_ranks(Path(sys.argv[1]))
