"""A disk that takes no more, told in one sentence that says where and what to do, instead of a traceback."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from streamrl.errors import StorageError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EIO)


def storage_error(error: BaseException, folder: Path) -> StorageError | None:
    """What to tell instead of an error; None: it is of another kind.

    Args:
        folder: of the run whose process met it.
    """
    path = error.filename if isinstance(error, OSError) else None
    where = f"{path} (run folder {folder})" if path is not None else f"run folder {folder}"
    # Libraries that write by themselves (safetensors, torch) hand on the system's words alone.
    if (isinstance(error, OSError) and error.errno in _FULL) or os.strerror(errno.ENOSPC) in str(error):
        return StorageError(f"the disk is full: {where}. Free space, then streamrl resume {folder}")
    if isinstance(error, OSError) and error.errno in _UNWRITABLE:
        reason = os.strerror(error.errno)
        return StorageError(f"{reason}: {where}. Once that is mended, streamrl resume {folder}")
    return None


@contextlib.contextmanager
def told_as_storage_error(folder: Path) -> Iterator[None]:
    """Raises StorageError for what a full or unwritable disk does within, and lets everything else through."""
    try:
        yield
    except OSError as error:
        if (told := storage_error(error, folder)) is None:
            raise
        raise told from error
