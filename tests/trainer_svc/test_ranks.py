"""Real processes on loopback. A rank's program is a short script that this module writes and runs."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from trainer_svc.ranks import Place, Ranks, launched_place

_REPOSITORY = Path(__file__).parents[2]
_LIMIT_S = 90.0


def _program(folder: Path, body: str, num_ranks: int = 2) -> Path:
    """A program that runs `body` on every rank; `folder` is where ranks leave files."""
    path = folder / "program.py"
    path.write_text(
        textwrap.dedent(
            f"""
            import os, signal, sys, time
            from pathlib import Path
            sys.path.insert(0, {str(_REPOSITORY)!r})
            from streamrl.errors import ServiceDiedError
            from trainer_svc.ranks import join_ranks

            folder = Path({str(folder)!r})
            with join_ranks({num_ranks}, [sys.executable, __file__], os.environ) as ranks:
                (folder / f"pid-{{ranks.rank}}").write_text(str(os.getpid()))
            """
        )
        + textwrap.indent(textwrap.dedent(body), "    ")
    )
    return path


def _environment() -> dict[str, str]:
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    inherited = {name: value for name, value in os.environ.items() if name not in launcher}
    return {**inherited, "OMP_NUM_THREADS": "1"}


def _run(program: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, program], env=_environment(), capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_bytes_reach_every_rank_and_come_back(tmp_path):
    program = _program(
        tmp_path,
        """
        for size in (0, 1, 3_000_000):
            data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
            assert ranks.broadcast_bytes(data if ranks.rank == 0 else None) == data
            mine = data[: ranks.rank * 7]
            assert ranks.gather_bytes(mine) == [data[:0], data[:7], data[:14]]
        ranks.barrier()
        (folder / f"done-{ranks.rank}").touch()
        """,
        num_ranks=3,
    )
    result = _run(program)
    assert result.returncode == 0, result.stderr
    assert {path.name for path in tmp_path.glob("done-*")} == {"done-0", "done-1", "done-2"}


@pytest.mark.parametrize(
    ("death", "reason"), [("sys.exit(3)", "exit code 3"), ("os.kill(os.getpid(), signal.SIGKILL)", "exit code -9")]
)
def test_a_rank_that_dies_ends_rank_0_with_its_reason(tmp_path, death, reason):
    program = _program(
        tmp_path,
        f"""
        ranks.barrier()
        if ranks.rank == 1:
            {death}
        while True:
            ranks.broadcast_bytes(b"nothing yet" if ranks.rank == 0 else None)
            time.sleep(0.05)
        """,
    )
    result = _run(program)
    assert result.returncode != 0
    assert "ServiceDiedError: trainer rank 1" in result.stderr
    assert reason in result.stderr


def test_a_rank_that_never_comes_ends_rank_0_with_its_reason(tmp_path):
    program = _program(tmp_path, "raise AssertionError('joined')")
    program.write_text(f"import os, sys\nif 'RANK' in os.environ:\n    sys.exit(7)\n{program.read_text()}")
    result = _run(program)
    assert "ServiceDiedError: trainer rank 1" in result.stderr
    assert "exit code 7" in result.stderr


def test_an_error_on_rank_0_ends_the_others(tmp_path):
    program = _program(
        tmp_path,
        """
        ranks.barrier()
        if ranks.rank == 0:
            raise KeyError("of rank 0")
        ranks.broadcast_bytes(None)
        """,
    )
    result = _run(program)
    assert "of rank 0" in result.stderr
    assert not _lives(int((tmp_path / "pid-1").read_text()))


def test_ranks_do_not_outlive_a_killed_rank_0(tmp_path):
    program = _program(
        tmp_path,
        """
        ranks.barrier()
        if ranks.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
        """,
    )
    assert _run(program).returncode == -signal.SIGKILL
    # The kernel's signal comes with rank 0's death; its delivery may take a moment.
    pid = int((tmp_path / "pid-1").read_text())
    deadline = time.monotonic() + 10
    while _lives(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _lives(pid)


def test_ranks_of_an_outside_launcher_join_as_they_were_told(tmp_path):
    program = _program(
        tmp_path,
        """
        assert ranks.broadcast_bytes(b"hello" if ranks.rank == 0 else None) == b"hello"
        (folder / f"done-{ranks.rank}").touch()
        """,
    )
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", program],
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert {path.name for path in tmp_path.glob("done-*")} == {"done-0", "done-1"}


def test_without_a_launcher_there_is_no_place():
    assert launched_place({"HOME": "/root"}) is None


def test_a_launchers_place_is_read_from_the_environment():
    environment = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert launched_place(environment) == Place(3, 4, 1, "10.0.0.1", 29500)


@pytest.mark.parametrize("change", [{"WORLD_SIZE": None}, {"MASTER_PORT": "many"}])
def test_half_a_place_is_refused_with_what_to_do(change):
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    broken = {name: value for name, value in {**environment, **change}.items() if value is not None}
    with pytest.raises(ValueError, match="unset RANK"):
        launched_place(broken)


def test_one_rank_needs_no_connection():
    ranks = Ranks(0, 1)
    assert ranks.broadcast_bytes(b"data") == b"data"
    assert ranks.gather_bytes(b"data") == [b"data"]
    ranks.barrier()
