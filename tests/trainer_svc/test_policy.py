"""DeepSpeed for real, on a model of 20 thousand parameters; what it should do is written here in plain PyTorch."""

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
from trainer_svc.checkpoint import load_checkpoint, save_checkpoint
from trainer_svc.losses import OFF_POLICY, SURROGATES, ClipRange, PolicyObjective, aggregation_of
from trainer_svc.microbatches import TrainSample, collate, cut, cut_packed, deal, empty_micro_batch, loss_count
from trainer_svc.optimizer import OptimizerRules
from trainer_svc.packed_attention import take_packed_attention
from trainer_svc.policy import Policy, StepStats
from trainer_svc.ranks import Ranks, join_ranks
from trainer_svc.rows import RowCost, make_rows
from trainer_svc.sharded_model import Sharding

pytestmark = pytest.mark.filterwarnings("ignore:`torch.distributed:FutureWarning")

_REPOSITORY = Path(__file__).parents[2]
_AGGREGATION = aggregation_of("token_mean", 16)
_MAX_GRAD_NORM = 0.05
"""Below the norms that occur here: clipping is part of what is compared."""
_TEMPERATURE = 0.8
_STAGES = (0, 1, 2, 3)


def _samples(num_samples: int = 12, *, seed: int = 0) -> list[TrainSample]:
    draw = random.Random(seed)
    samples = []
    for index in range(num_samples):
        length = draw.randint(1, 20)
        samples.append(
            TrainSample(
                identity=(0, index, 0),
                prompt_token_ids=[draw.randrange(40) for _ in range(draw.randint(1, 4))],
                answer_token_ids=[draw.randrange(40) for _ in range(length)],
                behaviour_logprobs=[-draw.uniform(2, 5) for _ in range(length)],
                advantage=draw.gauss(0, 1),
                own_version=[True] * length,
            )
        )
    return samples


def _policy(
    model: Qwen2ForCausalLM,
    zero_stage: int,
    dtype: str = "float32",
    *,
    learning_rate: float = 1e-3,
    gradient_checkpointing: bool = False,
) -> Policy:
    return Policy(
        model,
        objective=PolicyObjective(SURROGATES["grpo"], ClipRange(0.2, 0.2), OFF_POLICY["ratio"], 2.0),
        temperature=_TEMPERATURE,
        rules=OptimizerRules(learning_rate, 0, (0.9, 0.95), 0.1, _MAX_GRAD_NORM),
        sharding=Sharding(zero_stage, dtype, gradient_checkpointing),
    )


def _plain_logprobs(model: Qwen2ForCausalLM, sample: TrainSample) -> Tensor:
    """Of the answer's tokens: one unpadded sequence through the model, all logits in float32."""
    token_ids = torch.tensor([[*sample.prompt_token_ids, *sample.answer_token_ids]])
    logits = model(input_ids=token_ids).logits[0, len(sample.prompt_token_ids) - 1 : -1] / _TEMPERATURE
    return torch.log_softmax(logits, dim=-1).gather(-1, torch.tensor(sample.answer_token_ids)[:, None]).squeeze(-1)


def _plain_steps(batches: Sequence[Sequence[TrainSample]]) -> tuple[dict[str, Tensor], float]:
    """Weights after one step a batch, and the last gradient norm, of a loop that anyone would write."""
    model = small_model()
    named = dict(model.named_parameters())
    matrices = [named[name] for name in named if named[name].ndim >= 2 and "embed" not in name]
    others = [named[name] for name in named if named[name].ndim < 2 or "embed" in name]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    grad_norm = torch.tensor(0.0)
    for samples in batches:
        loss = torch.zeros(())
        for sample in samples:
            ratio = (_plain_logprobs(model, sample) - torch.tensor(sample.behaviour_logprobs)).exp()
            loss = loss - torch.minimum(ratio * sample.advantage, ratio.clamp(0.8, 1.2) * sample.advantage).sum()
        (loss / sum(len(sample.answer_token_ids) for sample in samples)).backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), _MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, float(grad_norm)


def _step(policy: Policy, samples: Sequence[TrainSample], micro_batch_tokens: int, ranks: Ranks) -> StepStats:
    micro_batches = [collate([[sample] for sample in part], _AGGREGATION) for part in cut(samples, micro_batch_tokens)]
    random.Random(micro_batch_tokens).shuffle(micro_batches)
    for dealt in deal(micro_batches, ranks.world_size, empty_micro_batch()):
        policy.accumulate(dealt[ranks.rank])
    return policy.step(loss_count(samples, _AGGREGATION))


def _max_difference(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert list(weights) == list(expected)
    return max(float((weights[name].float() - expected[name].float()).abs().max()) for name in expected)


@pytest.fixture(scope="module")
def plain() -> tuple[dict[str, Tensor], float]:
    return _plain_steps([_samples(), _samples(seed=1)])


@pytest.mark.parametrize("zero_stage", [0, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2)), 3])
def test_steps_are_those_of_the_whole_batch_in_plain_pytorch_however_it_is_cut(ranks, plain, zero_stage):
    weights, grad_norm = plain
    for micro_batch_tokens in (1, 60, 10_000):
        policy = _policy(small_model(), zero_stage)
        _step(policy, _samples(), micro_batch_tokens, ranks)
        stats = _step(policy, _samples(seed=1), micro_batch_tokens, ranks)
        assert _max_difference(dict(policy.weights()), weights) < 1e-5
        assert stats.grad_norm == pytest.approx(grad_norm, rel=1e-5)
        assert stats.grad_norm > _MAX_GRAD_NORM
        assert stats.num_tokens == sum(len(sample.answer_token_ids) for sample in _samples(seed=1))
        assert (stats.applied, stats.step) == (True, 2)
        policy.close()


def _groups() -> list[TrainSample]:
    """Three prompts with four answers each."""
    samples = _samples()
    return [
        dataclasses.replace(
            sample, identity=(0, index // 4, index % 4), prompt_token_ids=samples[index - index % 4].prompt_token_ids
        )
        for index, sample in enumerate(samples)
    ]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("zero_stage", [0, 3])
def test_answers_that_share_a_row_have_the_gradients_of_rows_of_their_own(ranks, zero_stage, packed):
    model = small_model()
    if packed:
        take_packed_attention(model)
    policy = _policy(model, zero_stage, gradient_checkpointing=packed)
    assert policy.row_cost is not None
    assert policy.packs == packed
    rows = make_rows(_groups(), RowCost(each_token=1.0, each_pair=0.0), 60)
    assert len(rows) < len(_groups())
    for part in (cut_packed if packed else cut)(rows, 150):
        policy.accumulate(collate([row.samples for row in part], _AGGREGATION, packed=packed))
    stats = policy.step(loss_count(_groups(), _AGGREGATION))
    weights, grad_norm = _plain_steps([_groups()])
    assert _max_difference(dict(policy.weights()), weights) < 1e-5
    assert stats.grad_norm == pytest.approx(grad_norm, rel=1e-5)
    assert stats.num_tokens == sum(len(sample.answer_token_ids) for sample in _groups())
    policy.close()


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_gradient_checkpointing_changes_nothing(ranks, zero_stage):
    policy = _policy(small_model(), zero_stage, gradient_checkpointing=True)
    _step(policy, _samples(), 100, ranks)
    assert _max_difference(dict(policy.weights()), _plain_steps([_samples()])[0]) < 1e-5
    policy.close()


def _two_ranks_at_all_stages(folder: Path) -> None:
    """Run as a program, by two ranks."""
    with join_ranks(2, [sys.executable, __file__, str(folder)], os.environ) as ranks:
        for zero_stage in _STAGES:
            policy = _policy(small_model(), zero_stage)
            # These make an odd number of micro-batches: one rank passes an empty one.
            _step(policy, _samples(), 70, ranks)
            checkpoint = save_checkpoint(
                folder / f"stage-{zero_stage}", attempt=1, iteration=1, saved=policy, state={}, keep=1, ranks=ranks
            )
            stats = _step(policy, _samples(seed=1), 70, ranks)
            weights = dict(policy.weights())
            policy.close()
            resumed = _policy(small_model(), zero_stage)
            load_checkpoint(checkpoint, saved=resumed, ranks=ranks)
            assert _step(resumed, _samples(seed=1), 70, ranks) == stats
            resumed_weights = dict(resumed.weights())
            resumed.close()
            if ranks.rank == 0:
                assert _max_difference(resumed_weights, weights) == 0
                safetensors.torch.save_file(weights, folder / f"weights-{zero_stage}.safetensors")
                (folder / f"grad-norm-{zero_stage}").write_text(str(stats.grad_norm))


# Two ranks are for every day in test_trainer.py.
@pytest.mark.slow
def test_two_ranks_step_like_one_and_resume_where_they_were(tmp_path, plain):
    assert len(cut(_samples(), 70)) % 2 == 1
    command = [sys.executable, __file__, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(_REPOSITORY), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    weights, grad_norm = plain
    for zero_stage in _STAGES:
        saved = safetensors.torch.load_file(tmp_path / f"weights-{zero_stage}.safetensors")
        assert _max_difference({name: saved[name] for name in weights}, weights) < 1e-5
        assert float((tmp_path / f"grad-norm-{zero_stage}").read_text()) == pytest.approx(grad_norm, rel=1e-5)


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_leaving_out_samples_without_advantage_changes_nothing(ranks, zero_stage):
    """Also when a later step has no other samples, and only momentum moves the weights."""
    flat = [dataclasses.replace(sample, advantage=0.0) for sample in _samples(seed=2)]
    weights = []
    for passed in ([], flat):
        policy = _policy(small_model(), zero_stage)
        for learning in (_samples(), []):
            for part in cut([*learning, *passed], 100):
                policy.accumulate(collate([[sample] for sample in part], _AGGREGATION))
            policy.step(loss_count([*learning, *flat], _AGGREGATION))
        weights.append(dict(policy.weights()))
        policy.close()
    assert _max_difference(*weights) < 1e-6


@pytest.mark.parametrize(
    ("zero_stage", "dtype"),
    [
        (0, "float32"),
        (2, "bfloat16"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, "float32"), (3, "float32"), (1, "bfloat16"))),
    ],
)
def test_a_gradient_that_is_not_finite_changes_nothing(ranks, zero_stage, dtype):
    weights = []
    for spoilt in (False, True):
        policy = _policy(small_model(), zero_stage, dtype)
        _step(policy, _samples(), 100, ranks)
        if spoilt:
            broken = collate([_samples(1)], _AGGREGATION)
            broken.advantages.fill_(float("nan"))
            policy.accumulate(broken)
            stats = policy.step(10.0)
            assert (stats.applied, stats.step, stats.grad_norm) == (False, 1, math.inf)
        stats = _step(policy, _samples(seed=1), 100, ranks)
        assert (stats.step, stats.num_skipped) == (2, int(spoilt))
        weights.append(dict(policy.weights()))
        policy.close()
    assert _max_difference(*weights) == 0


@pytest.mark.parametrize("zero_stage", [*(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 2)), 3])
def test_bfloat16_accumulates_in_float32(ranks, zero_stage):
    policy = _policy(small_model(), zero_stage, "bfloat16", learning_rate=0.0)
    micro_batch = collate([_samples(1)], _AGGREGATION)
    policy.accumulate(micro_batch)
    once = policy.step(1.0).grad_norm
    # 1000 + 16 * 1.5 is 1024, but 1000 to a sum that keeps 8 bits.
    for times in (1000.0, *[1.5] * 16):
        policy.accumulate(dataclasses.replace(micro_batch, advantages=micro_batch.advantages * times))
    assert policy.step(1024.0).grad_norm == pytest.approx(once, rel=0.005)
    policy.close()


@pytest.mark.parametrize("zero_stage", [0, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (2, 3))])
def test_bfloat16_keeps_float32_weights_behind_its_own(ranks, zero_stage):
    """One update is far below the last digit of a weight that is 1; eight are not."""
    policy = _policy(small_model(), zero_stage, "bfloat16", learning_rate=5e-4)
    micro_batch = collate([_samples(1)], _AGGREGATION)
    name = "model.norm.weight"
    seen = []
    for _ in range(8):
        policy.accumulate(micro_batch)
        policy.step(1.0)
        seen.append(dict(policy.weights())[name])
    assert seen[0].dtype == torch.bfloat16
    assert float((seen[0] - 1).abs().max()) == 0
    assert float((seen[-1] - 1).abs().max()) > 0
    policy.close()


def test_tied_weights_are_handed_out_once_under_their_first_name(ranks):
    model = small_model(tied=True)
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    policy = _policy(model, 3)
    weights = dict(policy.weights())
    assert "lm_head.weight" not in weights
    assert _max_difference(weights, expected) == 0
    policy.close()


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_scores_of_padded_sequences_are_those_of_each_alone(ranks, zero_stage):
    model = small_model()
    sequences = [[*sample.prompt_token_ids, *sample.answer_token_ids] for sample in _samples()]
    expected = []
    for sequence in sequences:
        logits = model(input_ids=torch.tensor([sequence])).logits[0, :-1]
        expected.append(
            torch.log_softmax(logits, dim=-1).gather(-1, torch.tensor(sequence[1:])[:, None])[:, 0].tolist()
        )
    policy = _policy(model, zero_stage)
    for scored, reference in zip(policy.score(sequences), expected, strict=True):
        assert scored == pytest.approx(reference, abs=1e-5)
    # Scoring leaves no trace in the next step.
    _step(policy, _samples(), 100, ranks)
    assert _max_difference(dict(policy.weights()), _plain_steps([_samples()])[0]) < 1e-5
    policy.close()


def test_a_step_of_nothing_is_refused(ranks):
    policy = _policy(small_model(), 0)
    with pytest.raises(ValueError, match="global_count"):
        policy.step(0)
    policy.close()


if __name__ == "__main__":
    _two_ranks_at_all_stages(Path(sys.argv[1]))
