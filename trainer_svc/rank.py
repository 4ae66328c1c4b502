"""The life of one trainer rank: join the others, load the model, then lead or follow."""

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from streamrl.v1.weights_pb2 import ModelFile
from trainer_svc import resumption
from trainer_svc.assembly import networks_of
from trainer_svc.checkpoint import load_checkpoint
from trainer_svc.control import StopAskedError, TrainerControl
from trainer_svc.leader import lead
from trainer_svc.learner import Learner
from trainer_svc.losses import aggregation_of
from trainer_svc.model_cache import default_cache_folder
from trainer_svc.models import ModelFiles, resolve_model
from trainer_svc.ranks import Ranks, join_ranks
from trainer_svc.settings import TrainerSettings
from trainer_svc.task import Task, load_task

logger = logging.getLogger(__name__)


def run_rank(
    settings: TrainerSettings,
    control: TrainerControl,
    instance: str,
    *,
    command: Sequence[str],
    environment: Mapping[str, str],
) -> None:
    """Returns when the run is over.

    Args:
        instance: name of this process in the run.
        command: what starts this program again, for the other ranks.
        environment: of this process.

    Raises:
        StreamRLError: the run failed.
        ValueError: what the settings name cannot be used.
    """
    torch.set_num_threads(settings.trainer.num_threads)
    torch.manual_seed(settings.run.seed)
    if settings.trainer.deterministic:
        # Some operations have no such form on some devices: they warn.
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        trainer = settings.trainer
        with join_ranks(trainer.num_ranks, command, environment, num_nodes=trainer.num_nodes) as ranks:
            train(settings, control, instance, ranks)
    except StopAskedError:
        logger.info("stopped before the first iteration")


def train(settings: TrainerSettings, control: TrainerControl, instance: str, ranks: Ranks) -> None:
    """What a rank does among the others. Raises as `run_rank`."""

    def starting(what: str) -> None:
        logger.info("%s", what)
        control.show("starting", what)
        if control.stop_asked():
            raise StopAskedError

    model = resolve_model(
        settings.model.path,
        dtype=settings.model.dtype,
        seed=settings.run.seed,
        cache_folder=default_cache_folder(),
        report=starting,
    )
    # Before the model itself, which takes longer: bad data is to be told at once.
    starting("prompts and rewards")
    task = load_task(settings, model) if ranks.rank == 0 else None
    with contextlib.ExitStack() as stack:
        if task is not None:
            stack.callback(task.rewards.close)
        _train_task(settings, control, instance, ranks, model, task, starting)


def _train_task(
    settings: TrainerSettings,
    control: TrainerControl,
    instance: str,
    ranks: Ranks,
    model: ModelFiles,
    task: Task | None,
    starting: Callable[[str], None],
) -> None:
    """What a rank does when it knows model and task; rank 0 alone has a task."""
    for sentence in task.prompts.notes() if task is not None else ():
        control.note(sentence)
    checkpoint = _checkpoint(settings, ranks)
    # Read before the policy, too: data that is not that of the checkpoint is to be told at once.
    begun = resumption.begin(settings, task.prompts.train, checkpoint) if task is not None else None
    starting("DeepSpeed")
    networks = networks_of(settings, model)
    learner = Learner(
        networks,
        ranks,
        aggregation=aggregation_of(settings.trainer.aggregation, settings.generator.max_tokens),
        micro_batch_tokens=settings.trainer.micro_batch_tokens,
        row_cost=networks.policy.row_cost if settings.trainer.share_prompts else None,
    )
    try:
        if checkpoint is not None:
            starting(f"checkpoint {checkpoint.name}")
            load_checkpoint(checkpoint, saved=networks, ranks=ranks)
        if task is None or begun is None:
            learner.follow()
        else:
            files = [ModelFile(name=name, content=content) for name, content in model.files.items()]
            lead(settings, instance, control, learner, task, files, *begun)
    finally:
        networks.close()


def _checkpoint(settings: TrainerSettings, ranks: Ranks) -> Path | None:
    """What rank 0 finds to continue: all ranks must load the same."""
    found = resumption.newest_checkpoint(settings) if ranks.rank == 0 else None
    name = ranks.broadcast_bytes(str(found or "").encode() if ranks.rank == 0 else None).decode()
    return Path(name) if name else None
