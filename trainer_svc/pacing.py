"""The modes: when training may begin, and what happens around it. The learning code is the same for all.

sync        trains as samples arrive; evaluations block
async       trains as samples arrive; evaluations run beside training
colocated   trains when the whole batch is there, on a machine that the generators give up meanwhile
"""

from collections.abc import Callable
from typing import Protocol

from streamrl.v1.scheduler_pb2 import FLEET_PHASE_GENERATE, FLEET_PHASE_TRAIN, FleetPhase
from trainer_svc.settings import TrainerSettings


class Pacing(Protocol):
    """What a mode decides."""

    @property
    def min_tokens(self) -> int | None:
        """Trainable tokens that are enough to begin with; None: only a whole batch is."""

    @property
    def evaluations_block(self) -> bool:
        """Whether evaluations between the first and the last one stop training."""

    @property
    def waits_for_publication(self) -> bool:
        """Whether a version must be announced before the iteration is over."""

    def before_training(self) -> None:
        """The first passes of an iteration come next."""

    def before_generation(self) -> None:
        """The iteration's version is announced or on its way."""


class Streamed:
    """sync and async: the stages run beside each other."""

    waits_for_publication = False

    def __init__(self, min_tokens: int | None, *, evaluations_block: bool) -> None:
        self.min_tokens = min_tokens
        self.evaluations_block = evaluations_block

    def before_training(self) -> None: ...

    def before_generation(self) -> None: ...


class InTurn:
    """colocated: one stage has the machine at a time."""

    min_tokens = None
    evaluations_block = True
    waits_for_publication = True

    def __init__(self, set_phase: Callable[[FleetPhase.ValueType], None]) -> None:
        self._set_phase = set_phase

    def before_training(self) -> None:
        self._set_phase(FLEET_PHASE_TRAIN)

    def before_generation(self) -> None:
        self._set_phase(FLEET_PHASE_GENERATE)


def pacing_of(settings: TrainerSettings, set_phase: Callable[[FleetPhase.ValueType], None]) -> Pacing:
    """The pacing of the settings' mode.

    Args:
        set_phase: moves the fleet; answers when it has moved.
    """
    if settings.pipeline.mode == "colocated":
        return InTurn(set_phase)
    min_tokens = None if settings.trainer.deterministic else settings.trainer.saturation_tokens
    return Streamed(min_tokens, evaluations_block=settings.pipeline.mode == "sync")
