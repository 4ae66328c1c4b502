"""Files that are replaced whole: a reader sees the old content or the new one, whatever dies in between."""

import contextlib
import os
from pathlib import Path


def create_file(path: Path, content: str) -> None:
    """Writes a file that nobody has written yet: of several who try at once, one succeeds.

    Raises:
        FileExistsError: it is there already.
        OSError: it could not be written.
    """
    new = path.with_name(f".{path.name}.new.{os.getpid()}")
    try:
        new.write_text(content)
        # Opening it for creation instead would show an empty file to whoever reads before the content is there.
        os.link(new, path)
    finally:
        new.unlink(missing_ok=True)


def replace_file(path: Path, content: str | bytes, *, mode: int = 0o644, flush: bool = False) -> None:
    """Writes a file anew. When that fails, the old one stands, and nothing is left beside it.

    Args:
        mode: its permissions.
        flush: returns when it would outlive a loss of power too.

    Raises:
        OSError: it could not be written.
    """
    data = content.encode() if isinstance(content, str) else content
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(data)
            if flush:
                file.flush()
                os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise
    if flush:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
