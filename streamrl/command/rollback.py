"""`streamrl rollback`: a run that does not run goes back to an earlier weight version, with all that belongs to it.

Weight version N is what training had made after N iterations, so one can go back to where there is a checkpoint, and
to the beginning. The checkpoints behind it are set aside. The next attempt (`streamrl resume`; in a cluster, the next
start of the trainer) then continues from there: weights, optimizer and the walk over the data are those of that time,
weights_svc forgets the versions above N and announces N again, and every generator, which starts over with the attempt,
begins with it. Answers of forgotten versions do not count.
"""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from streamrl.command.attempts import wait_for_earlier_processes
from streamrl.command.report import EXIT_COMPLETED, write_error, write_json
from streamrl.command.runs import named_run
from streamrl.run_folder import Checkpoint, RunFolder
from streamrl.storage import told_as_storage_error

_PROCESSES_END_S = 15.0
"""Whatever is killed, its children end within 10 s."""
SET_ASIDE = "rolled_back"
"""Folder among the checkpoints: what lies there is no checkpoint to anybody, and for the user to delete."""


def rollback(arguments: Namespace) -> int:
    """Runs the command.

    Returns:
        The exit code.

    Raises:
        ValueError: there is no such run, it still runs, or it has no checkpoint of that version.
    """
    folder = _run_folder(arguments.run)
    with folder.lock(), told_as_storage_error(folder.path):
        if folder.record.exists():
            wait_for_earlier_processes(folder.read_record(), _PROCESSES_END_S, write_error)
        above = newer_than(folder.checkpoints(), arguments.version)
        aside = folder.path / "checkpoints" / SET_ASIDE
        # The newest first: whatever ends this in between, the run goes on from one of them.
        for checkpoint in reversed(above):
            aside.mkdir(exist_ok=True)
            checkpoint.path.rename(aside / checkpoint.path.name)
        # How the run ended is not how it ends now: one that was completed can be taken up again.
        folder.summary.unlink(missing_ok=True)
    names = [checkpoint.path.name for checkpoint in above]
    write_error(
        f"the next attempt of run {folder.path.name} continues from weight version {arguments.version}; "
        + (f"set aside in {aside}: {', '.join(names)}" if names else "there is no later checkpoint")
    )
    if arguments.json:
        write_json({"run_id": folder.path.name, "weight_version": arguments.version, "set_aside": names})
    return EXIT_COMPLETED


def _run_folder(run: str | None) -> RunFolder:
    """What RUN means, or the folder that `serve trainer` keeps a run in: that one has no record of a command."""
    served = None if run is None else RunFolder(Path(run).resolve())
    return served if served is not None and served.attempt.is_file() else named_run(run)


def newer_than(checkpoints: Sequence[Checkpoint], weight_version: int) -> Sequence[Checkpoint]:
    """Those that an attempt would take before the newest one of a version.

    Args:
        checkpoints: oldest first.

    Raises:
        ValueError: there is none of that version.
    """
    if weight_version == 0:
        return checkpoints
    places = [place for place, checkpoint in enumerate(checkpoints) if checkpoint.iteration == weight_version]
    if not places:
        known = ", ".join(map(str, sorted({0, *(checkpoint.iteration for checkpoint in checkpoints)})))
        raise ValueError(
            f"there is no checkpoint of weight version {weight_version}: one can go back to {known}. "
            "trainer.checkpoint_every and trainer.keep_checkpoints say which are kept"
        )
    return checkpoints[places[-1] + 1 :]
