"""The trainer's ranks: starting several on each machine, joining those of other machines, and bytes between them.

The process that is started on a machine leads that machine's ranks: it starts the others as copies of its own command
and ends them. With several machines something outside starts one such process on each and tells it by NODE_RANK,
MASTER_ADDR and MASTER_PORT which machine it is and where rank 0 is to be met. Under torchrun (or anything else that
sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT) each process joins as the rank it was given. What
travels between ranks is bytes and safetensors, never pickles. Gradients and weights travel by DeepSpeed.
"""

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from streamrl import lifetime
from streamrl.errors import ServiceDiedError

logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Longest that a rank waits for the others inside one collective; rank 0 speaks far more often than that."""
_START_CHECK_S = 0.2
"""Between looks at whether ranks that have not come yet still live."""
_STORE_CHECK_S = 1.0
"""Between looks at whether a rank 0 that is to end still lives."""
_START_WORD_S = 30.0
"""Between words about ranks that have not come yet."""
_END_GRACE_S = 30.0
"""Time that the other ranks have to end after the one that leads them is done."""
_REAP_S = 5.0
"""A connection to a dead rank breaks a moment before the kernel reports its exit."""


@dataclass(frozen=True)
class Place:
    """Where one process stands among the ranks."""

    rank: int
    world_size: int
    local_rank: int
    master_address: str
    master_port: int
    """0: any free one (only for a rank 0 that starts the others)."""
    hosts_store: bool = True
    """Whether rank 0 hosts the store at the master's address; torchrun's agent may do it instead."""
    launch: str = ""
    """Tells one launch from the next when a store outlives its ranks (torchrun restarts)."""


def launched_place(environment: Mapping[str, str]) -> Place | None:
    """The place an outside launcher, or rank 0, gave to this process; None when nothing did.

    Raises:
        ValueError: RANK is set but another variable that goes with it is missing or no number.
    """
    if "RANK" not in environment:
        return None
    try:
        return Place(
            rank=int(environment["RANK"]),
            world_size=int(environment["WORLD_SIZE"]),
            local_rank=int(environment["LOCAL_RANK"]),
            master_address=environment["MASTER_ADDR"],
            master_port=int(environment["MASTER_PORT"]),
            hosts_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            launch=environment.get("TORCHELASTIC_RESTART_COUNT", ""),
        )
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"RANK is set, so WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT must be too: {error}; "
            "unset RANK to let the trainer start its ranks itself"
        ) from error


def leading_place(environment: Mapping[str, str], num_ranks: int, num_nodes: int) -> Place:
    """The place of the process that starts the ranks of its machine: the first of them.

    Args:
        environment: has NODE_RANK (0 to num_nodes - 1), MASTER_ADDR and MASTER_PORT when there are several machines.
        num_ranks: over all machines, as many on each.
        num_nodes: machines.

    Raises:
        ValueError: with several machines one of these variables is missing or no such number.
    """
    if num_nodes == 1:
        return Place(rank=0, world_size=num_ranks, local_rank=0, master_address=_LOOPBACK, master_port=0)
    try:
        node, address, port = int(environment["NODE_RANK"]), environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"trainer.num_nodes is {num_nodes}, so each machine's trainer must be told by NODE_RANK, MASTER_ADDR and "
            f"MASTER_PORT which one it is and where the first one is met: {error}; set them, or trainer.num_nodes to 1"
        ) from error
    if not 0 <= node < num_nodes:
        raise ValueError(f"NODE_RANK is {node}: expected 0 to {num_nodes - 1}, since trainer.num_nodes is {num_nodes}")
    return Place(
        rank=node * (num_ranks // num_nodes),
        world_size=num_ranks,
        local_rank=0,
        master_address=address,
        master_port=port,
    )


class Ranks:
    """The ranks as one of them sees them. Every method but `check` is collective: all ranks call it, in one order."""

    def __init__(self, rank: int, world_size: int, children: Sequence["subprocess.Popen[bytes]"] = ()) -> None:
        self.rank = rank
        self.world_size = world_size
        self._children = children

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Rank 0's data, on every rank; the others pass None.

        Raises:
            ServiceDiedError: a rank has ended.
        """
        if self.world_size == 1:
            assert data is not None
            return data
        self.check()
        with self._dead_rank_explained():
            size = torch.tensor([len(data) if data is not None else 0])
            dist.broadcast(size, src=0)
            payload = torch.empty(int(size), dtype=torch.uint8)
            if data:
                payload.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            if len(payload):
                dist.broadcast(payload, src=0)
        return payload.numpy().tobytes()

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's data in their order, on every rank.

        Raises:
            ServiceDiedError: a rank has ended.
        """
        if self.world_size == 1:
            return [data]
        self.check()
        with self._dead_rank_explained():
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
            dist.all_gather(sizes, torch.tensor([len(data)]))
            longest = max(int(size) for size in sizes)
            own = torch.zeros(max(longest, 1), dtype=torch.uint8)
            if data:
                own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            payloads = [torch.empty_like(own) for _ in sizes]
            dist.all_gather(payloads, own)
        return [payload[: int(size)].numpy().tobytes() for payload, size in zip(payloads, sizes, strict=True)]

    def barrier(self) -> None:
        """Returns when every rank has called it.

        Raises:
            ServiceDiedError: a rank has ended.
        """
        self.gather_bytes(b"")

    def check(self) -> None:
        """Raises ServiceDiedError when a rank that this process started has ended. Not collective, costs nothing."""
        for rank, child in enumerate(self._children, start=self.rank + 1):
            if child.poll() is not None:
                raise ServiceDiedError(f"trainer rank {rank} (pid {child.pid}) ended with exit code {child.returncode}")

    @contextlib.contextmanager
    def _dead_rank_explained(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._explain(error)
            raise ServiceDiedError(f"the connection between trainer ranks broke: {error}") from error

    def _explain(self, error: BaseException) -> None:
        """Raises ServiceDiedError instead of what a broken collective says, when a rank has ended."""
        deadline = time.monotonic() + _REAP_S
        while self._children and time.monotonic() < deadline and all(child.poll() is None for child in self._children):
            time.sleep(0.05)
        try:
            self.check()
        except ServiceDiedError as death:
            raise death from error


@contextlib.contextmanager
def join_ranks(
    num_ranks: int, command: Sequence[str], environment: Mapping[str, str], *, num_nodes: int = 1
) -> Iterator[Ranks]:
    """This process's place among the ranks, with torch.distributed ready, until the block ends.

    Without RANK in the environment this process leads its machine's ranks (`leading_place`) and starts the others of
    them; when the block ends without an error they have 30 s to end too, and with one they are killed. Whichever dies,
    the others follow: the started ones by the kernel's parent-death signal, rank 0 at its next word to them, those of
    other machines when their connection to it breaks. Call it from the main thread.

    Args:
        num_ranks: at least 1; with an outside launcher it must be the launcher's WORLD_SIZE.
        command: what starts this same program, for the other ranks.
        environment: os.environ of this process.
        num_nodes: machines that the ranks are spread over, as many on each.

    Raises:
        ValueError: the launcher's world size is another, or this machine does not know its place among several.
        ServiceDiedError: a rank did not come, or ended while others still worked, or with an error.
    """
    launched = launched_place(environment)
    if launched is not None:
        lifetime.die_with_parent()
    place = launched or leading_place(environment, num_ranks, num_nodes)
    if place.world_size != num_ranks:
        raise ValueError(f"trainer.num_ranks is {num_ranks}, but the launcher started {place.world_size} ranks")
    store = _meet(place, again=launched is None)
    children = (
        _start_others(command, environment, place, num_ranks // num_nodes, store.port) if launched is None else []
    )
    ranks = Ranks(place.rank, place.world_size, children)
    try:
        launch_store = PrefixStore(f"trainer{place.launch}", store)
        launch_store.set(_started(place.rank), "")
        if launched is None:
            _await_start(ranks, launch_store)
        _init_process_group(place, launch_store)
        yield ranks
        _await_end(place.rank, children)
        if launched is None and num_nodes > 1:
            _await_end_of_nodes(place.rank, num_ranks, num_nodes, launch_store)
    except RuntimeError as error:
        ranks._explain(error)
        raise
    finally:
        for child in children:
            child.kill()
            child.wait()
        if dist.is_initialized():
            dist.destroy_process_group()


def _meet(place: Place, *, again: bool) -> "dist.TCPStore":  # type: ignore[name-defined]
    """The store at rank 0, which hosts it.

    Args:
        again: this process may be the next life of one that rank 0 has not missed yet. What that one left in the store
            would lead this one astray: it waits for the store of rank 0's own next life.

    Raises:
        ServiceDiedError: rank 0 goes on without this rank.
    """
    deadline = time.monotonic() + _COLLECTIVE_TIMEOUT.total_seconds()
    while True:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            place.master_address,
            place.master_port,
            place.world_size,
            is_master=place.rank == 0 and place.hosts_store,
            wait_for_workers=False,
            timeout=_COLLECTIVE_TIMEOUT,
        )
        if not again or store.add(f"lives-{place.rank}", 1) == 1:
            return store
        logger.warning("rank 0 has not missed an earlier life of rank %d yet: waiting for its next", place.rank)
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < deadline:
                store.check([_started(0)])
                time.sleep(_STORE_CHECK_S)
            raise ServiceDiedError(f"rank 0 does not end, although an earlier life of rank {place.rank} has")


def _start_others(
    command: Sequence[str], environment: Mapping[str, str], leader: Place, ranks_on_node: int, port: int
) -> list["subprocess.Popen[bytes]"]:
    children = []
    for local_rank in range(1, ranks_on_node):
        rank = leader.rank + local_rank
        place = {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(leader.world_size),
            "MASTER_ADDR": leader.master_address,
            "MASTER_PORT": str(port),
        }
        # Nothing to save, and a collective without rank 0 does not end: killed at once.
        child = lifetime.spawn(command, env={**environment, **place}, with_signal=signal.SIGKILL)
        logger.info("rank %d of %d: pid %d", rank, leader.world_size, child.pid)
        children.append(child)
    return children


def _started(rank: int) -> str:
    return f"started-{rank}"


def _await_start(ranks: Ranks, store: Store) -> None:
    """Waits until all others have come; one of this machine that ended on its way must not be waited for."""
    begun = told = time.monotonic()
    missing = list(range(ranks.world_size))
    while missing := [rank for rank in missing if not store.check([_started(rank)])]:
        ranks.check()
        now = time.monotonic()
        if now - begun > _COLLECTIVE_TIMEOUT.total_seconds():
            raise ServiceDiedError(f"trainer ranks {missing} did not come within {_COLLECTIVE_TIMEOUT}")
        if now - told > _START_WORD_S:
            logger.warning("waiting for trainer ranks %s of %d", missing, ranks.world_size)
            told = now
        time.sleep(_START_CHECK_S)


def _init_process_group(place: Place, store: Store) -> None:
    # DeepSpeed insists on finding it in the environment.
    os.environ["LOCAL_RANK"] = str(place.local_rank)
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(place.local_rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=_COLLECTIVE_TIMEOUT,
    )


def _await_end(leader_rank: int, children: Sequence["subprocess.Popen[bytes]"]) -> None:
    for rank, child in enumerate(children, start=leader_rank + 1):
        try:
            code = child.wait(_END_GRACE_S)
        except subprocess.TimeoutExpired:
            raise ServiceDiedError(
                f"trainer rank {rank} did not end within {_END_GRACE_S:.0f} s of rank {leader_rank}"
            ) from None
        if code != 0:
            raise ServiceDiedError(f"trainer rank {rank} ended with exit code {code}")


def _await_end_of_nodes(leader_rank: int, num_ranks: int, num_nodes: int, store: Store) -> None:
    """Rank 0, whose process hosts the store, leaves last."""
    ended = [f"ended-{rank}" for rank in range(0, num_ranks, num_ranks // num_nodes)]
    store.set(f"ended-{leader_rank}", "")
    if leader_rank == 0:
        try:
            store.wait(ended, timedelta(seconds=_END_GRACE_S))
        except RuntimeError as error:
            raise ServiceDiedError(
                f"the trainer's ranks on other machines did not end within {_END_GRACE_S:.0f} s of rank 0"
            ) from error
