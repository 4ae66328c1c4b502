"""How long the stages take on how many devices, by the paper's Fig 2, and how devices are split. Pure.

Fig 2 gives both stages of a 7B model on 8 to 32 devices, each over its own time on 8. Between its points, times are
linear. What relates the two stages is taken from Fig 8: training takes what the paper's colocated iteration leaves
beside generation. So nothing here is chosen freely.
"""

from collections.abc import Callable, Iterable
from typing import Literal

import numpy as np

Stage = Literal["generation", "training"]

NUM_DEVICES = 32
_DEVICES = (8, 16, 24, 32)
_RELATIVE: dict[Stage, tuple[float, ...]] = {
    "generation": (1.0, 0.81, 0.74, 0.69),
    "training": (1.0, 0.54, 0.30, 0.19),
}
SPLITS = tuple((devices, NUM_DEVICES - devices) for devices in range(_DEVICES[0], NUM_DEVICES - _DEVICES[0] + 1))
"""(of generation, of training), as far as Fig 2 goes."""


def scaled_s(stage: Stage, seconds: float, *, measured_on: int, devices: int) -> float:
    """What takes `seconds` on some devices, on others."""
    return seconds * relative_time(stage, devices) / relative_time(stage, measured_on)


def relative_time(stage: Stage, devices: int) -> float:
    """Over the time on 8 devices."""
    if not _DEVICES[0] <= devices <= _DEVICES[-1]:
        raise ValueError(f"the paper's Fig 2 has {_DEVICES[0]} to {_DEVICES[-1]} devices, not {devices}")
    return float(np.interp(devices, _DEVICES, _RELATIVE[stage]))


def best_split(iteration_s: Callable[[int, int], float]) -> tuple[int, int]:
    """The split of least `iteration_s(of generation, of training)`; of equal ones that with the fewest generating."""
    return min(SPLITS, key=lambda split: (iteration_s(*split), split))


def streamed_end_s(work: Iterable[tuple[float, float]]) -> float:
    """When one who does pieces of work as they come is done.

    Args:
        work: (when it comes, how long it takes) of each piece.
    """
    end_s = 0.0
    for comes_s, takes_s in sorted(work):
        end_s = max(end_s, comes_s) + takes_s
    return end_s
