"""Losses and gradients of TRL's own trainers on the same tokens and log-probs.

TRL is not among what tests need: it is fetched from PyPI for this one. What it needs itself is installed here anyway.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer_svc.algorithms import ALGORITHMS
from trainer_svc.losses import (
    KL_ESTIMATORS,
    OFF_POLICY,
    SURROGATES,
    ClipRange,
    KlLoss,
    PolicyObjective,
    aggregation_of,
    policy_loss,
)
from trainer_svc.microbatches import TrainSample, collate

TRL = "trl==1.16.0"
MAX_TOKENS = 8
NUM_PROMPTS, SAMPLES = 3, 4
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "aggregation": "sequence_mean", "scale_rewards": "group"},
    "grpo with KL": {"loss_type": "grpo", "aggregation": "sequence_mean", "scale_rewards": "group", "beta": 0.1},
    "dr_grpo": {"loss_type": "dr_grpo", "aggregation": "sequence_sum", "scale_rewards": "none"},
    "dapo": {"loss_type": "dapo", "aggregation": "token_mean", "scale_rewards": "group", "epsilon_high": 0.28},
    "dapo truncated": {
        "loss_type": "dapo",
        "aggregation": "token_mean",
        "scale_rewards": "group",
        "epsilon_high": 0.28,
        "off_policy": "truncated",
    },
    "gspo": {
        "loss_type": "grpo",
        "aggregation": "sequence_mean",
        "scale_rewards": "group",
        "level": "sequence",
        "epsilon": 3e-2,
        "epsilon_high": 4e-2,
    },
    "cispo": {"loss_type": "cispo", "aggregation": "token_mean", "scale_rewards": "group", "epsilon_high": 1.5},
    "rloo": {"aggregation": "sequence_mean"},
}
# A process of its own: TRL changes what it imports. It calls the trainers' own loss, on log-probs that it is given.
PROGRAM = """
import json, sys, types
import torch
from accelerate import PartialState
PartialState()
from trl import GRPOTrainer, RLOOTrainer

tensors = torch.load(sys.argv[1], weights_only=True)
cases = json.loads(sys.argv[2])

class Accelerator:
    num_processes = 1
    def gather(self, tensor): return tensor
    def gather_for_metrics(self, tensor): return tensor
    def reduce(self, tensor, reduction): return tensor

class Metrics(dict):
    def __missing__(self, key):
        self[key] = []
        return self[key]

results = {}
for name, case in cases.items():
    logprobs = tensors["logprobs"].clone().requires_grad_()
    kind = RLOOTrainer if name == "rloo" else GRPOTrainer
    trainer = object.__new__(kind)
    attributes = dict(
        model=types.SimpleNamespace(training=True),
        accelerator=Accelerator(),
        args=types.SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        _metrics={"train": Metrics(), "eval": Metrics()},
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        importance_sampling_level=case.get("level", "token"),
        beta=case.get("beta", 0.0), loss_type=case.get("loss_type"),
        epsilon_low=case.get("epsilon", 0.2), epsilon_high=case.get("epsilon_high", 0.2),
        use_vllm="off_policy" in case, vllm_importance_sampling_correction=True,
        max_completion_length=tensors["max_tokens"], current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False, use_liger_kernel=False,
    )
    for key, value in attributes.items():
        object.__setattr__(trainer, key, value)
    trainer._get_per_token_logps_and_entropies = lambda *a, **k: (logprobs, torch.zeros_like(logprobs), None)
    mask = tensors["mask"]
    rewards = tensors["rewards"]  # (prompts, samples)
    if name == "rloo":
        n = rewards.shape[1]
        advantages = rewards - (rewards.sum(1, keepdim=True) - rewards) / (n - 1)
    else:
        advantages = rewards - rewards.mean(1, keepdim=True)
        if case["scale_rewards"] == "group":
            advantages = advantages / (rewards.std(1, keepdim=True) + 1e-4)
    inputs = dict(
        prompt_ids=torch.ones(len(mask), 1, dtype=torch.long), prompt_mask=torch.ones(len(mask), 1, dtype=torch.long),
        completion_ids=tensors["tokens"], completion_mask=mask, advantages=advantages.flatten(),
        old_per_token_logps=tensors["behaviour"], old_logps=(tensors["behaviour"] * mask).sum(1),
        ref_per_token_logps=tensors["reference"], num_items_in_batch=mask.sum(),
    )
    if "off_policy" in case:
        inputs["old_per_token_logps"] = logprobs.detach()
        inputs["importance_sampling_ratio"] = (logprobs.detach() - tensors["behaviour"]).exp().clamp(max=2.0)
    loss = trainer._compute_loss(None, inputs)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    results[name] = (loss.detach(), gradient)
torch.save(results, sys.argv[3])
"""


def _samples() -> tuple[list[list[TrainSample]], dict[str, Any]]:
    """The same answers as samples, by prompt, and as TRL has them."""
    generator = torch.Generator().manual_seed(0)
    count = NUM_PROMPTS * SAMPLES
    lengths = torch.randint(2, MAX_TOKENS + 1, (count,), generator=generator)
    behaviour, present, reference = (-torch.rand(count, MAX_TOKENS, generator=generator) - 0.5 for _ in range(3))
    tensors = {
        "behaviour": behaviour,
        "logprobs": behaviour + (present - behaviour) * 0.4,
        "reference": reference,
        "rewards": torch.rand(NUM_PROMPTS, SAMPLES, generator=generator),
        "tokens": torch.randint(0, 9, (count, MAX_TOKENS), generator=generator),
        "mask": (torch.arange(MAX_TOKENS) < lengths[:, None]).long(),
        "max_tokens": MAX_TOKENS,
    }
    groups = [
        [
            TrainSample(
                identity=(0, group, sample),
                prompt_token_ids=[1],
                answer_token_ids=tensors["tokens"][row, : lengths[row]].tolist(),
                behaviour_logprobs=behaviour[row, : lengths[row]].tolist(),
                advantage=0.0,
                own_version=[True] * int(lengths[row]),
                reference_logprobs=reference[row, : lengths[row]],
            )
            for sample in range(SAMPLES)
            for row in [group * SAMPLES + sample]
        ]
        for group in range(NUM_PROMPTS)
    ]
    return groups, tensors


def _ours(name: str, groups: list[list[TrainSample]], tensors: dict[str, Any]) -> tuple[Tensor, Tensor]:
    case, algorithm = CASES[name], name.split()[0]
    aggregation = aggregation_of(case["aggregation"], MAX_TOKENS)
    clip = ClipRange(case.get("epsilon", 0.2), case.get("epsilon_high", 0.2))
    if algorithm == "cispo":
        clip = ClipRange(1.0, case["epsilon_high"] - 1)
    kl = KlLoss(KL_ESTIMATORS["k3"], case["beta"]) if "beta" in case else None
    off_policy = OFF_POLICY[case.get("off_policy", "ratio")]
    objective = PolicyObjective(SURROGATES[algorithm], clip, off_policy, 2.0, kl)
    group_advantages = ALGORITHMS[algorithm].group_advantages
    assert group_advantages is not None
    logprobs = tensors["logprobs"].clone().requires_grad_()
    loss, count = torch.zeros(()), 0.0
    for index, group in enumerate(groups):
        advantages = group_advantages(tensors["rewards"][index].tolist())
        for sample, advantage in zip(group, advantages, strict=True):
            row, length = index * SAMPLES + sample.identity[2], len(sample.answer_token_ids)
            micro_batch = collate([[replace(sample, advantage=advantage)]], aggregation)
            own = logprobs[row : row + 1, :length]
            loss = loss + policy_loss(objective, own, torch.zeros_like(own), micro_batch)[0]
            count += aggregation.count(length)
    loss = loss / count
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return loss.detach(), gradient


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tensor, Tensor]]:
    folder = tmp_path_factory.mktemp("trl")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder / "trl"), TRL]
    installed = subprocess.run(install, capture_output=True, text=True, timeout=200, check=False)
    if installed.returncode != 0:
        pytest.skip(f"{TRL} cannot be had: {installed.stderr.strip()[-200:]}")
    _, tensors = _samples()
    torch.save(tensors, folder / "in.pt")
    command = [sys.executable, "-c", PROGRAM, str(folder / "in.pt"), json.dumps(CASES), str(folder / "out.pt")]
    environment = {**os.environ, "PYTHONPATH": str(folder / "trl"), "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    results: dict[str, tuple[Tensor, Tensor]] = torch.load(Path(folder / "out.pt"), weights_only=True)
    return results


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(CASES))
def test_loss_and_gradient_are_trls(theirs: dict[str, tuple[Tensor, Tensor]], name: str) -> None:
    groups, tensors = _samples()
    loss, gradient = _ours(name, groups, tensors)
    expected_loss, expected_gradient = theirs[name]
    assert expected_gradient.abs().max() > 1e-3
    torch.testing.assert_close(loss, expected_loss, rtol=0, atol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-5)
