"""AdamW's rules: the learning rate of each step, and which parameters decay. Pure.

How a step comes about is trainer_svc/sharded_model.py.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True)
class OptimizerRules:
    """AdamW's."""

    learning_rate: float
    """The highest: after the warm-up."""
    warmup_steps: int
    betas: tuple[float, float]
    weight_decay: float
    """Of matrices; norms, biases and embeddings do not decay."""
    max_grad_norm: float
    """Clips the norm of the divided gradient; 0 does not clip."""
    schedule: Schedule = "constant"
    """After the warm-up."""
    num_steps: int = 0
    """Of the whole run: what linear and cosine fall over. constant does not ask."""
    final_share: float = 0.0
    """Of the learning rate, that linear and cosine fall to."""


def learning_rate_at(step: int, rules: OptimizerRules) -> float:
    """Of optimizer step `step` (0 is the first): linear from 1 / warmup_steps of the rate; then constant, or falling
    towards the final rate, which the step after the last one would have, and all beyond it."""
    if step < rules.warmup_steps:
        return rules.learning_rate * (step + 1) / rules.warmup_steps
    if rules.schedule == "constant":
        return rules.learning_rate
    progress = min(1.0, (step - rules.warmup_steps) / max(1, rules.num_steps - rules.warmup_steps))
    left = 1.0 - progress if rules.schedule == "linear" else (1.0 + math.cos(math.pi * progress)) / 2
    return rules.learning_rate * (rules.final_share + (1.0 - rules.final_share) * left)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trained parameters as AdamW takes them: those that decay, and norms, biases and embeddings, which do not. An
    output layer that is the embedding's own tensor does not either."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if weight_decay == 0.0:
        return [{"params": trained, "weight_decay": 0.0}]
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    decaying = [parameter for parameter in trained if parameter.ndim >= 2 and id(parameter) not in embeddings]
    decays = {id(parameter) for parameter in decaying}
    others = [parameter for parameter in trained if id(parameter) not in decays]
    groups = [(decaying, weight_decay), (others, 0.0)]
    return [{"params": parameters, "weight_decay": decay} for parameters, decay in groups if parameters]
