"""Model folders that are made once and kept: whole or not at all, by one process at a time."""

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)


def default_cache_folder() -> Path:
    """`streamrl` in the user's cache folder, as the XDG base directory specification has it."""
    # A relative path is invalid there and must be ignored.
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "streamrl"


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """The folder, made first when it is not there.

    Args:
        folder: its name must change with everything that decides its content: one that exists is taken as it is.
        make: fills an empty folder that stands beside it and takes its name when it is complete and on the disk.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _only_one_maker(folder):
        if folder.is_dir():
            return folder
        _remove_leftovers(folder)
        unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}.unfinished-", dir=folder.parent))
        try:
            make(unfinished)
            _sync_to_disk(unfinished)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


@contextmanager
def _only_one_maker(folder: Path) -> Iterator[None]:
    """Holds a lock that the kernel gives back when its holder ends, however it ends."""
    with folder.with_name(folder.name + ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that is making %s", folder)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove_leftovers(folder: Path) -> None:
    """Half-made folders of makers that were killed; the lock is held, so none is in use."""
    for leftover in folder.parent.glob(f"{folder.name}.unfinished-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _sync_to_disk(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
