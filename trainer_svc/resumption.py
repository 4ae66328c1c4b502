"""What an attempt begins with: the newest checkpoint, or nothing but the initial model.

lineage.json    what each attempt continues (trainer_svc/ancestry.py)
tracker.json    the run's id at the tracker, known before there is a checkpoint
"""

import json
import logging
from functools import partial
from pathlib import Path

from streamrl.errors import StaleAttemptError
from streamrl.whole_file import replace_file
from trainer_svc.acceptance import SharedVersion
from trainer_svc.ancestry import INITIAL_MODEL, Origin, read_origins, shared_version, write_origins
from trainer_svc.checkpoint import attempt_of, checkpoints, load_state
from trainer_svc.data import PromptSet
from trainer_svc.lineage import Lineage, TrainerState
from trainer_svc.prompt_cursor import CursorState
from trainer_svc.rollout_counts import RolloutCounts
from trainer_svc.settings import TrainerSettings

logger = logging.getLogger(__name__)


def newest_checkpoint(settings: TrainerSettings) -> Path | None:
    """The checkpoint that this attempt continues; None: there is none yet.

    Raises:
        StaleAttemptError: it is of this attempt or a later one, so this process is of a life that is over.
    """
    found = checkpoints(settings.run.folder / "checkpoints")
    if not found:
        return None
    attempt = attempt_of(found[-1])
    if attempt >= settings.run.attempt:
        raise StaleAttemptError(
            f"{found[-1]} is of attempt {attempt}, and this trainer is of attempt {settings.run.attempt}: an attempt "
            "begins once. Resume the run",
            attempt,
        )
    return found[-1]


def begin(settings: TrainerSettings, prompts: PromptSet, checkpoint: Path | None) -> tuple[TrainerState, SharedVersion]:
    """The state that this attempt begins with, and which versions it has in common with earlier ones; what it continues
    is on the disk when this returns.

    Args:
        prompts: of training.

    Raises:
        ValueError: the checkpoint is of other data, or has more iterations than the run is to have.
        CheckpointError: it is damaged.
    """
    attempt = settings.run.attempt
    if checkpoint is None:
        state, origin = _initial_state(settings, prompts), INITIAL_MODEL
    else:
        state = TrainerState.from_json(load_state(checkpoint))
        check_fits(settings, prompts, state)
        origin = Origin(state.attempt, state.lineage.iteration)
        logger.info("attempt %d continues %s", attempt, checkpoint.name)
    file = settings.run.folder / "lineage.json"
    origins = {**read_origins(file), attempt: origin}
    write_origins(file, origins)
    return state, partial(_shared_with, origins, attempt)


def check_fits(settings: TrainerSettings, prompts: PromptSet, state: TrainerState) -> None:
    """
    Raises:
        ValueError: as `begin`.
    """
    iteration, num_iterations = state.lineage.iteration, settings.trainer.num_iterations
    if iteration > num_iterations:
        raise ValueError(
            f"trainer.num_iterations is {num_iterations}, and the checkpoint has {iteration} iterations behind it: set "
            "it higher"
        )
    cursor = CursorState.from_json(dict(state.cursor), len(prompts))
    if cursor.seed != settings.run.seed:
        raise ValueError(f"run.seed is {settings.run.seed}, and the checkpoint was made with {cursor.seed}")
    if state.data_digest != prompts.digest:
        raise ValueError(
            "data.train has other prompts than when the checkpoint was made, or they are other tokens now: resume with "
            "the same data, or start a new run from the checkpoint's model"
        )


def _initial_state(settings: TrainerSettings, prompts: PromptSet) -> TrainerState:
    return TrainerState(
        attempt=settings.run.attempt,
        lineage=Lineage(),
        cursor=CursorState(settings.run.seed, len(prompts)).to_json(),
        counts=RolloutCounts(),
        redispatched=0,
        dead_letters=0,
        wall_s=0.0,
        wait_s=0.0,
        open_evaluations=(0,),
        data_digest=prompts.digest,
    )


def _shared_with(origins: dict[int, Origin], mine: int, earlier: int) -> int:
    return shared_version(origins, earlier, mine)


def tracker_run(settings: TrainerSettings, state: TrainerState) -> str:
    """The run's id at the tracker, if an earlier attempt was logged there; else empty."""
    try:
        return str(json.loads((settings.run.folder / "tracker.json").read_text())["run_id"])
    except (OSError, ValueError, KeyError):
        return state.tracker_run_id


def keep_tracker_run(settings: TrainerSettings, run_id: str) -> None:
    """Notes the run's id at the tracker for later attempts."""
    replace_file(settings.run.folder / "tracker.json", json.dumps({"run_id": run_id}))
