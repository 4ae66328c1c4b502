"""Which weight versions two attempts of a run have in common.

Version numbers count iterations, so after a resume the same number may stand for other weights: attempt 1 reached
version 6, attempt 2 continues from its checkpoint of version 4 and makes a version 5 of its own. What an attempt
continues is its origin; the origins of all attempts are a tree, and a rollout of an earlier attempt is of my lineage as
far as its versions lie before the two lines part.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from streamrl.errors import CheckpointError
from streamrl.whole_file import replace_file


@dataclass(frozen=True, slots=True)
class Origin:
    """What an attempt continues."""

    attempt: int
    """0 stands for the initial model."""
    iteration: int
    """Of the checkpoint: its weight version."""


INITIAL_MODEL = Origin(0, 0)


def shared_version(origins: Mapping[int, Origin], earlier: int, mine: int) -> int:
    """The newest weight version of attempt `earlier` that is one of attempt `mine` too; -1: none is known to be.

    Args:
        origins: attempt to what it continues.
    """
    its_line, my_line = _line(origins, earlier), _line(origins, mine)
    shared = [min(its_line[attempt], my_line[attempt]) for attempt in its_line.keys() & my_line.keys()]
    return int(max(shared, default=-1))


def _line(origins: Mapping[int, Origin], attempt: int) -> dict[int, float]:
    """The attempts on the way back to the initial model, with the newest version that each contributes.

    Empty where the way is not known to its end: such an attempt had not begun to train.
    """
    line: dict[int, float] = {attempt: math.inf}
    newest = math.inf
    while attempt != INITIAL_MODEL.attempt:
        origin = origins.get(attempt)
        if origin is None or origin.attempt >= attempt:
            return {}
        attempt, newest = origin.attempt, min(newest, origin.iteration)
        line[attempt] = newest
    return line


def read_origins(file: Path) -> dict[int, Origin]:
    """What `write_origins` wrote; empty where there is no such file.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        return {int(attempt): Origin(**origin) for attempt, origin in json.loads(file.read_text()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{file} is damaged: {error}. Without it (delete it) the run continues, and what earlier attempts have "
            "generated is generated again"
        ) from error


def write_origins(file: Path, origins: Mapping[int, Origin]) -> None:
    """Replaces the file; it is on the disk when this returns."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = json.dumps({str(attempt): asdict(origin) for attempt, origin in sorted(origins.items())}, indent=1)
    replace_file(file, lines, flush=True)
