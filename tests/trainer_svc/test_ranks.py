"""Real processes on loopback. A rank's program is a short script that this module writes and runs."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from streamrl.command.ports import free_port
from trainer_svc.ranks import Place, Ranks, launched_place, leading_place

_REPOSITORY = Path(__file__).parents[2]
_LIMIT_S = 90.0


def _program(folder: Path, body: str, num_ranks: int = 2, num_nodes: int = 1) -> Path:
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
            with join_ranks({num_ranks}, [sys.executable, __file__], os.environ, num_nodes={num_nodes}) as ranks:
                (folder / f"pid-{{ranks.rank}}").write_text(str(os.getpid()))
            """
        )
        + textwrap.indent(textwrap.dedent(body), "    ")
    )
    return path


def _environment() -> dict[str, str]:
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    inherited = {name: value for name, value in os.environ.items() if name not in launcher}
    return {**inherited, "OMP_NUM_THREADS": "1"}


def _run(program: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, program], env=_environment(), capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )


def _start_node(program: Path, node_rank: int, port: int) -> "subprocess.Popen[str]":
    place = {"NODE_RANK": str(node_rank), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    return subprocess.Popen(
        [sys.executable, program], env={**_environment(), **place}, stderr=subprocess.PIPE, text=True
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


def test_ranks_of_two_machines_meet_whichever_comes_first(tmp_path):
    program = _program(
        tmp_path,
        """
        assert ranks.broadcast_bytes(b"hello" if ranks.rank == 0 else None) == b"hello"
        assert ranks.gather_bytes(str(ranks.rank).encode()) == [b"0", b"1", b"2", b"3"]
        (folder / f"done-{ranks.rank}-{os.environ['LOCAL_RANK']}").touch()
        """,
        num_ranks=4,
        num_nodes=2,
    )
    port = free_port("127.0.0.1", set())
    nodes = [_start_node(program, node_rank, port) for node_rank in (1, 0)]
    outputs = [node.communicate(timeout=_LIMIT_S)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert {path.name for path in tmp_path.glob("done-*")} == {"done-0-0", "done-1-1", "done-2-0", "done-3-1"}


@pytest.mark.slow
@pytest.mark.parametrize("killed_rank", [0, 2, 3])
def test_a_rank_that_dies_ends_those_of_every_machine(tmp_path, killed_rank):
    program = _program(
        tmp_path,
        f"""
        ranks.barrier()
        if ranks.rank == {killed_rank}:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            ranks.broadcast_bytes(b"nothing yet" if ranks.rank == 0 else None)
            time.sleep(0.05)
        """,
        num_ranks=4,
        num_nodes=2,
    )
    port = free_port("127.0.0.1", set())
    nodes = [_start_node(program, node_rank, port) for node_rank in (0, 1)]
    outputs = [node.communicate(timeout=_LIMIT_S)[1] for node in nodes]
    assert all(node.returncode != 0 for node in nodes), outputs
    assert "ServiceDiedError" in "".join(outputs)
    pids = [int(path.read_text()) for path in tmp_path.glob("pid-*")]
    deadline = time.monotonic() + 10
    while any(map(_lives, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(_lives, pids))


@pytest.mark.slow
def test_a_machine_that_is_back_before_rank_0_has_missed_it_joins_rank_0_s_next_life(tmp_path):
    program = _program(
        tmp_path,
        """
        life = len(list(folder.glob(f"life-{ranks.rank}-*")))
        (folder / f"life-{ranks.rank}-{life}").touch()
        ranks.barrier()
        if ranks.rank == 1 and life == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        while ranks.rank == 0 and life == 0 and not (folder / "back").exists():
            time.sleep(0.05)
        ranks.broadcast_bytes(b"hello" if ranks.rank == 0 else None)
        (folder / f"done-{ranks.rank}").touch()
        """,
        num_ranks=2,
        num_nodes=2,
    )
    port = free_port("127.0.0.1", set())
    first, second = (_start_node(program, node_rank, port) for node_rank in (0, 1))
    second.communicate(timeout=_LIMIT_S)
    back = _start_node(program, 1, port)
    assert back.stderr is not None
    # It says so when it has met the old rank 0.
    assert any("waiting for its next" in line for line in back.stderr)
    (tmp_path / "back").touch()
    assert "ServiceDiedError" in first.communicate(timeout=_LIMIT_S)[1]
    again = _start_node(program, 0, port)
    outputs = [node.communicate(timeout=_LIMIT_S)[1] for node in (again, back)]
    assert [again.returncode, back.returncode] == [0, 0], outputs
    assert {path.name for path in tmp_path.glob("done-*")} == {"done-0", "done-1"}


def test_the_first_process_of_a_machine_leads_its_ranks():
    environment = {"NODE_RANK": "1", "MASTER_ADDR": "trainer-0.trainer", "MASTER_PORT": "29500"}
    assert leading_place(environment, 16, 2) == Place(8, 16, 0, "trainer-0.trainer", 29500)
    assert leading_place({}, 16, 1) == Place(0, 16, 0, "127.0.0.1", 0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"NODE_RANK": None}, "NODE_RANK"), ({"MASTER_PORT": "many"}, "many"), ({"NODE_RANK": "2"}, "expected 0 to 1")],
)
def test_a_machine_that_does_not_know_its_place_among_several_is_refused(change, reason):
    environment = {"NODE_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    broken = {name: value for name, value in {**environment, **change}.items() if value is not None}
    with pytest.raises(ValueError, match=reason):
        leading_place(broken, 16, 2)


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
