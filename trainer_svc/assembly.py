"""From the settings to what is trained and how: networks, and the recipe of a batch."""

import logging
import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from trainer_svc.adapters import LoraRules, add_adapters
from trainer_svc.algorithms import ALGORITHMS
from trainer_svc.batch_training import KlReward, Recipe
from trainer_svc.critic import Critic
from trainer_svc.losses import (
    KL_ESTIMATORS,
    OFF_POLICY,
    SURROGATES,
    ClipRange,
    KlLoss,
    PolicyObjective,
    aggregation_of,
)
from trainer_svc.models import ModelFiles
from trainer_svc.networks import Networks
from trainer_svc.optimizer import OptimizerRules
from trainer_svc.packed_attention import take_packed_attention, why_no_kernel, why_not_packed
from trainer_svc.policy import Policy
from trainer_svc.reference import PolicyWithoutAdapters, Reference
from trainer_svc.settings import TrainerSettings
from trainer_svc.sharded_model import DTYPES, Sharding, import_deepspeed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


def networks_of(settings: TrainerSettings, model: ModelFiles) -> Networks:
    """Loads the model as often as the algorithm needs it. Every rank calls it.

    Raises:
        ValueError: as `ModelFiles.load_model` and `add_adapters`; offloading or packing is asked for where it cannot
            be.
    """
    trainer, temperature = settings.trainer, settings.generator.temperature
    has_critic, warm_up = ALGORITHMS[trainer.algorithm].has_critic, trainer.critic_warmup_iterations
    sharding = Sharding(
        trainer.zero_stage, settings.model.dtype, trainer.gradient_checkpointing, "optimizer" in trainer.offload
    )
    _refuse_offload_on_cpu(settings)
    actor = _learning_model(settings, model)
    packs = _packs(settings, actor)

    def ready(loaded: "PreTrainedModel") -> "PreTrainedModel":
        if packs:
            take_packed_attention(loaded)
        return loaded

    policy = Policy(
        ready(actor),
        objective=_objective(settings),
        temperature=temperature,
        rules=_rules(settings, trainer.learning_rate, trainer.num_iterations - (warm_up if has_critic else 0)),
        sharding=sharding,
    )
    reference: Reference | PolicyWithoutAdapters | None = None
    if trainer.kl != "none" and trainer.lora_rank > 0:
        reference = PolicyWithoutAdapters(policy)
    elif trainer.kl != "none":
        reference = Reference(
            ready(model.load_model()),
            temperature=temperature,
            sharding=sharding,
            offload="reference" in trainer.offload,
        )
    critic = None
    if has_critic:
        critic = Critic(
            ready(_learning_model(settings, model)),
            clip=trainer.value_clip or math.inf,
            rules=_rules(settings, trainer.critic_rate, trainer.num_iterations),
            sharding=sharding,
        )
    return Networks(policy, reference, critic, keeps_proximal=_keeps_proximal(settings))


def _device() -> torch.device:
    """Where this rank computes."""
    return torch.device(import_deepspeed().accelerator.get_accelerator().current_device_name())


def _packs(settings: TrainerSettings, model: "PreTrainedModel") -> bool:
    """Whether micro-batches are packed: the same on every rank."""
    packing, device = settings.trainer.packing, _device()
    if packing == "off" or (packing == "auto" and device.type == "cpu"):
        return False
    why_not = why_not_packed(model)
    # On CPUs attention is computed without the kernel.
    if why_not is None and device.type != "cpu":
        why_not = why_no_kernel(model.config, device, DTYPES[settings.model.dtype])
    packs = torch.tensor(int(why_not is None), device=device)
    dist.all_reduce(packs, op=dist.ReduceOp.MIN)
    if packs:
        return True
    why_not = why_not or "another rank cannot"
    if packing == "on":
        raise ValueError(f"trainer.packing is on: {why_not}. Leave it out")
    logger.info("micro-batches are padded: %s", why_not)
    return False


def _refuse_offload_on_cpu(settings: TrainerSettings) -> None:
    if settings.trainer.offload and _device().type == "cpu":
        raise ValueError(
            f"trainer.offload is {', '.join(settings.trainer.offload)}: this machine trains on its CPUs, and all is in "
            "host memory already. Leave it out"
        )


def _learning_model(settings: TrainerSettings, model: ModelFiles) -> "PreTrainedModel":
    trainer = settings.trainer
    loaded = model.load_model()
    if trainer.lora_rank > 0:
        add_adapters(loaded, LoraRules(trainer.lora_rank, trainer.adapter_alpha, trainer.lora_targets))
    return loaded


def recipe_of(settings: TrainerSettings) -> Recipe:
    """What becomes of a batch."""
    trainer, algorithm = settings.trainer, ALGORITHMS[settings.trainer.algorithm]
    in_reward = trainer.kl == "reward"
    return Recipe(
        algorithm=algorithm,
        aggregation=aggregation_of(trainer.aggregation, settings.generator.max_tokens),
        steps_per_batch=trainer.steps_per_batch,
        prepares=trainer.kl != "none" or algorithm.has_critic or _keeps_proximal(settings),
        kl_reward=KlReward(KL_ESTIMATORS[trainer.estimator], trainer.kl_coefficient) if in_reward else None,
        kl_in_loss=trainer.kl == "loss",
        discount=trainer.discount,
        trace=trainer.gae_lambda if algorithm.has_critic else 1.0,
        critic_warmup=trainer.critic_warmup_iterations,
    )


def _objective(settings: TrainerSettings) -> PolicyObjective:
    trainer = settings.trainer
    in_loss = trainer.kl == "loss"
    return PolicyObjective(
        surrogate=SURROGATES[trainer.algorithm],
        clip=ClipRange(*trainer.clip_range),
        off_policy=OFF_POLICY[settings.off_policy],
        importance_limit=trainer.importance_limit,
        kl=KlLoss(KL_ESTIMATORS[trainer.estimator], trainer.kl_coefficient) if in_loss else None,
    )


def _rules(settings: TrainerSettings, learning_rate: float, num_batches: int) -> OptimizerRules:
    trainer = settings.trainer
    return OptimizerRules(
        learning_rate=learning_rate,
        warmup_steps=trainer.warmup_steps,
        betas=trainer.betas,
        weight_decay=trainer.weight_decay,
        max_grad_norm=trainer.max_grad_norm,
        schedule=trainer.learning_rate_schedule,
        num_steps=num_batches * trainer.steps_per_batch,
        final_share=trainer.final_learning_rate_share,
    )


def _keeps_proximal(settings: TrainerSettings) -> bool:
    """Whether the policy at the batch's start is another than the present one, and anybody asks for it."""
    return settings.trainer.steps_per_batch > 1 and not OFF_POLICY[settings.off_policy].ratio_to_generator
