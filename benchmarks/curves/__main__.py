"""`python -m benchmarks.curves {run,draw}`: learning curves of the examples, run by run, and their page."""

import argparse
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.curves import plots
from benchmarks.curves.kept_run import KeptRun, load, path_of, save
from benchmarks.curves.page import page
from benchmarks.curves.perform import RunFailedError, perform, settings_of
from benchmarks.curves.studies import STUDIES, PlannedRun, planned_runs

logger = logging.getLogger(__name__)

DOCS = Path("docs")
DATA = DOCS / "curves" / "data"
RUNS = Path("runs") / "curves"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curves", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="do the runs that are missing, one after the other, and keep each")
    run.add_argument("names", nargs="*", help="only runs whose name begins with one of these")
    run.add_argument("--at-most", type=int, metavar="N", help="so many runs, then end")
    commands.add_parser("draw", help="make docs/curves.md and its plots of the runs that are kept")
    commands.add_parser("missing", help="name the runs that are not kept yet, or with other settings than today's")
    arguments = parser.parse_args()
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    if arguments.command == "run":
        return do_missing(DATA, arguments.names, arguments.at_most, lambda planned: perform(planned, RUNS))
    if arguments.command == "draw":
        draw(DOCS, DATA)
    else:
        sys.stdout.writelines(f"{planned.name}\n" for planned in missing(DATA))
    return 0


def missing(data: Path, beginnings: Sequence[str] = ()) -> Iterator[PlannedRun]:
    """Runs that are not kept, or with other settings than today's.

    Args:
        beginnings: of names; empty: all.
    """
    for planned in planned_runs():
        if not planned.name.startswith(tuple(beginnings) or ("",)):
            continue
        kept = load(path_of(data, planned.name))
        if (
            kept is None
            or not kept.is_asked(planned.config, planned.assignments)
            or not kept.learns_by(settings_of(planned))
        ):
            yield planned


def do_missing(
    data: Path, beginnings: Sequence[str], at_most: int | None, perform: Callable[[PlannedRun], KeptRun]
) -> int:
    """Does what is missing, and keeps each run as soon as it is over. One that fails is told, and the next is done.

    Args:
        beginnings: as `missing`.

    Returns:
        The exit code: 1 when one failed.
    """
    failed = 0
    for planned in list(missing(data, beginnings))[:at_most]:
        logger.info("%s: %s", planned.name, " ".join((planned.config, *planned.assignments)))
        try:
            save(path_of(data, planned.name), perform(planned))
        except RunFailedError as error:
            logger.error("%s", error)
            failed = 1
    logger.info("%d runs are missing", sum(1 for _ in missing(data, beginnings)))
    return failed


def draw(docs: Path, data: Path) -> None:
    """Makes the page and the plots of what is kept."""
    kept = kept_runs(data)
    for study in STUDIES:
        if any(kept[study.name].values()):
            plots.draw(docs / "curves" / f"{study.name}.svg", kept[study.name])
    (docs / "curves.md").write_text(page(STUDIES, kept))


def kept_runs(data: Path) -> dict[str, dict[str, list[KeptRun]]]:
    """By study and arm, by seed. Runs of an earlier recipe are none."""
    return {study.name: {arm.name: _kept(data, study.runs_of(arm)) for arm in study.arms} for study in STUDIES}


def _kept(data: Path, planned: Sequence[PlannedRun]) -> list[KeptRun]:
    runs = [(run, load(path_of(data, run.name))) for run in planned]
    return [kept for run, kept in runs if kept is not None and kept.is_asked(run.config, run.assignments)]


if __name__ == "__main__":
    sys.exit(main())
