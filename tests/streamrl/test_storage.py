"""Full disks: what is told of them, and what they leave."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.errors import StorageError
from streamrl.storage import storage_error, told_as_storage_error

RUN = Path("/runs/r")


def test_a_full_disk_is_told_with_the_folder_and_what_to_do() -> None:
    told = storage_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), RUN)
    assert str(told) == "the disk is full: run folder /runs/r. Free space, then streamrl resume /runs/r"
    told = storage_error(OSError(errno.EDQUOT, "Quota", "/tmp/x"), RUN)
    assert str(told) == "the disk is full: /tmp/x (run folder /runs/r). Free space, then streamrl resume /runs/r"
    assert storage_error(RuntimeError("I/O error: No space left on device (os error 28)"), RUN) is not None


def test_a_disk_that_cannot_be_written_is_told_with_its_reason() -> None:
    told = storage_error(OSError(errno.EROFS, os.strerror(errno.EROFS), "/runs/r/x"), RUN)
    assert str(told).startswith("Read-only file system: /runs/r/x (run folder /runs/r). ")


def test_other_errors_are_let_through() -> None:
    assert storage_error(FileNotFoundError(errno.ENOENT, "No such file", "x"), RUN) is None
    with pytest.raises(TimeoutError), told_as_storage_error(RUN):
        raise TimeoutError
    with pytest.raises(StorageError), told_as_storage_error(RUN):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_that_could_not_be_replaced_stands_and_has_nothing_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    # The largest file that this process may write stands in for what is left of a disk.
    program = (
        "import signal, sys; from pathlib import Path; from streamrl.whole_file import replace_file\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "replace_file(Path(sys.argv[1]), 'x' * 100_000)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(file)],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
    )
    assert "OSError: [Errno 27] File too large" in done.stderr
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]
