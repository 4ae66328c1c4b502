"""Member processes that meet, move bytes, and are killed, over sockets instead of NCCL."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from streamrl.errors import FabricError
from streamrl.fabric import member
from streamrl.fabric.member import FabricMember
from streamrl.fabric.regions import Region

LOOPBACK = Path(__file__).with_name("loopback_network.py")
DEADLINE_S = 60.0


@pytest.fixture
def start() -> Iterator[Callable[..., FabricMember]]:
    members = []

    def start(*flaws: str) -> FabricMember:
        started = FabricMember((sys.executable, str(LOOPBACK), *flaws))
        started.start()
        members.append(started)
        return started

    yield start
    for started in members:
        started.kill()


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_group_moves_one_version_after_another(start: Callable[..., FabricMember], tmp_path: Path):
    sender, *receivers = members = [start(), start(), start()]
    for started in members:
        wait_until(lambda started=started: started.ready)
    sizes, unique_id = [10, 0, 2500, 1, 1489], sender.mint()
    with ThreadPoolExecutor() as threads:
        for version in range(2):
            content = bytes((version + byte) % 251 for byte in range(4000))
            source = tmp_path / "source"
            source.write_bytes(b"head" + content)
            copies = [tmp_path / f"copy-{index}" for index in range(2)]
            moving = [threads.submit(_take_part, sender, unique_id, 0, source, _apart(4, sizes, gap=0))]
            for rank, (receiver, copy) in enumerate(zip(receivers, copies, strict=True), 1):
                copy.write_bytes(bytes(5000))
                moving.append(threads.submit(_take_part, receiver, unique_id, rank, copy, _apart(0, sizes, gap=50)))
            for moved in moving:
                moved.result(DEADLINE_S)
            for copy in copies:
                data = copy.read_bytes()
                assert b"".join(data[at : at + size] for at, size in _apart(0, sizes, gap=50)) == content


def _take_part(place: FabricMember, unique_id: bytes, rank: int, path: Path, regions: list[Region]) -> None:
    place.join(unique_id, rank, world_size=3)
    place.move(str(path), regions)


def _apart(first: int, sizes: list[int], *, gap: int) -> list[Region]:
    return [Region(first + sum(sizes[:index]) + gap * index, size) for index, size in enumerate(sizes)]


def test_a_group_that_does_not_meet_is_given_up_and_its_process_ended(
    start: Callable[..., FabricMember], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(member, "MEET_S", 0.1)
    sender = start()
    wait_until(lambda: sender.ready)
    with pytest.raises(FabricError, match="asked to join, the member process did not"):
        sender.join(sender.mint(), 0, world_size=2)
    wait_until(lambda: not sender.ready)
    sender.start()
    wait_until(lambda: sender.ready)


def test_who_asks_hears_of_a_kill_at_once(start: Callable[..., FabricMember]):
    sender = start()
    wait_until(lambda: sender.ready)
    threading.Timer(0.1, sender.kill).start()
    with pytest.raises(FabricError, match="the member process ended"):
        sender.join(sender.mint(), 0, world_size=2)
    with pytest.raises(FabricError, match="there is no member process"):
        sender.mint()


def test_a_process_that_reads_nothing_is_ended(start: Callable[..., FabricMember], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(member, "_MOVE_S", 0.1)
    stopped = start()
    wait_until(lambda: stopped.ready)
    (process,) = (child for child in psutil.Process().children() if str(LOOPBACK) in child.cmdline())
    process.suspend()
    with pytest.raises(FabricError, match="asked to move, the member process ended"):
        stopped.move("/nowhere", 100_000 * [Region(0, 0)])
    wait_until(lambda: not stopped.ready)


def test_what_fails_in_the_process_is_said(start: Callable[..., FabricMember]):
    receiver = start()
    wait_until(lambda: receiver.ready)
    with pytest.raises(FabricError, match="not joined yet"):
        receiver.move("/nowhere", [])


def test_where_no_device_is_there_is_one_warning_and_no_second_process(
    start: Callable[..., FabricMember], caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        blind = start("blind")
        wait_until(lambda: bool(caplog.records))
        for _ in range(3):
            blind.start()
    assert not blind.ready
    assert [record.getMessage() for record in caplog.records] == [
        "no weights by NCCL, all are fetched: RuntimeError: no device here"
    ]


@pytest.mark.slow
def test_the_real_process_says_when_there_is_no_gpu(caplog: pytest.LogCaptureFixture):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    with caplog.at_level(logging.WARNING):
        real = FabricMember()
        real.start()
        wait_until(lambda: bool(caplog.records))
    assert "RuntimeError: weights.fabric is set, and there is no CUDA device here" in caplog.text
