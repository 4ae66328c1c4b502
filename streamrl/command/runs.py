"""Which run a command means by RUN."""

import os
from pathlib import Path

from streamrl.run_folder import RunFolder, find_run
from streamrl.settings import RunSection

_RUNS_VARIABLE = "STREAMRL_RUN__DIR"


def named_run(run: str | None) -> RunFolder:
    """The run with this id or folder; None: the newest. Ids are looked up where `run.dir` is by default or environment.

    Raises:
        ValueError: there is no such run.
    """
    return find_run(run, Path(os.environ.get(_RUNS_VARIABLE) or RunSection().dir))
