"""Whether the engine's log-probs of a version's canaries are the trainer's: loading may fail without an error."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from generator_svc.engine import Engine
from streamrl.errors import EngineDiedError
from streamrl.v1.weights_pb2 import Canary, VersionManifest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Absolute differences of log-probs, in nats; nan when the engine gave any."""

    abs_diff_mean: float
    abs_diff_max: float
    num_tokens: int

    def is_off(self, alarm_nats: float) -> bool:
        """Whether the mean is above a limit, or no number."""
        return not self.abs_diff_mean <= alarm_nats


def compare(canaries: Sequence[Canary], scored: Sequence[Sequence[float]]) -> Agreement:
    """
    Args:
        scored: of each canary the engine's log-probs, one fewer than its tokens.
    """
    differences = [
        abs(ours - theirs)
        for canary, logprobs in zip(canaries, scored, strict=True)
        for ours, theirs in zip(logprobs, canary.logprobs, strict=True)
    ]
    if not differences:
        return Agreement(0.0, 0.0, 0)
    total = sum(differences)
    worst = max(differences) if total == total else total
    return Agreement(total / len(differences), worst, len(differences))


async def score_canaries(engine: Engine, manifest: VersionManifest, alarm_nats: float) -> Agreement:
    """Scores the canaries under the loaded version, and warns when they are off by more than `alarm_nats` on average.

    Raises:
        EngineDiedError: the engine ended, or gave another number of log-probs than there are tokens.
    """
    scored = await asyncio.gather(*(engine.score(list(canary.token_ids)) for canary in manifest.canaries))
    try:
        agreement = compare(manifest.canaries, scored)
    except ValueError as error:
        raise EngineDiedError(f"the engine's log-probs of the canaries do not fit their tokens: {error}") from error
    if agreement.is_off(alarm_nats):
        logger.warning(
            "version=%d: %d log-probs of canaries differ from the trainer's by %.3g nats on average (%.3g at most), "
            "expected %g or less: the weights are not those that the trainer has, or the two compute differently",
            manifest.weight_version,
            agreement.num_tokens,
            agreement.abs_diff_mean,
            agreement.abs_diff_max,
            alarm_nats,
        )
    return agreement
