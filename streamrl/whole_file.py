"""Files that are replaced whole: a reader sees the old content or the new one, whatever dies in between."""

import os
from pathlib import Path


def replace_file(path: Path, text: str, *, mode: int = 0o644, flush: bool = False) -> None:
    """Writes a file anew.

    Args:
        mode: its permissions.
        flush: returns when it would outlive a loss of power too.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file:
        file.write(text)
        if flush:
            file.flush()
            os.fsync(file.fileno())
    new.replace(path)
    if flush:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
