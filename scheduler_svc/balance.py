"""Which samples should leave an instance on which they wait for a place, because others have places. Pure.

It takes from full instances what they would begin last, as much as fits elsewhere. The instance answers whether it has
really not begun with a sample; only then does the sample go to another one. What should move by the progress that is
observed, running samples too, is scheduler_svc/picture.py's affair.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from streamrl.identity import SampleKey

if TYPE_CHECKING:
    from scheduler_svc.batches import Sample
    from scheduler_svc.registry import Life


def unstarted_to_move(lives: Sequence["Life"]) -> dict[str, list[SampleKey]]:
    """
    Args:
        lives: those that take work.

    Returns:
        By the name of the instance that has them; nothing while an earlier request is not answered.
    """
    room = sum(life.room for life in lives if not life.heartbeat.waiting) - sum(len(life.moves) for life in lives)
    found: dict[str, list[SampleKey]] = {}
    for life in sorted(lives, key=lambda life: (-life.heartbeat.waiting / life.request.max_running, life.name)):
        beat = life.heartbeat
        # Where fewer run than could, samples wait for weights or memory, and not for a place.
        if room < 1 or not beat.waiting or beat.running < life.request.max_running or life.moves:
            continue
        waiting = [
            sample
            for sample in sorted(life.samples.values(), key=start_order)[beat.running :]
            if sample.key not in life.begun
            and sample.key not in life.revokes
            and not sample.key.batch_key.is_evaluation
        ]
        # Half of what waits at a time: the rest begins soon, and more room may come.
        count = min(room, -(-min(len(waiting), beat.waiting) // 2))
        if count > 0:
            found[life.name] = [sample.key for sample in waiting[-count:]]
            room -= count
    return found


def start_order(sample: "Sample") -> tuple[bool, int, int, SampleKey]:
    """As an instance starts them, nearly: the order that scheduler_svc/admission.py gives them."""
    return not sample.key.batch_key.is_evaluation, sample.key.batch, -sample.expected_tokens, sample.key
