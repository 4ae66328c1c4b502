"""A member of a group: a process that does what its owner asks on standard input, one JSON line an answer.

    python -m streamrl.fabric.member_process

    ← {"ready": true}                                        or {"error": "..."}, and it ends
    → {"do": "mint"}
    ← {"unique_id": "hex"}
    → {"do": "join", "unique_id": "hex", "rank": n, "world_size": n}     leaves the group before
    ← {"joined": true}
    → {"do": "move", "path": "...", "regions": [[offset, num_bytes], ...]}   rank 0 reads the file, the others fill it
    ← {"moved": num_bytes}

Any error ends it: what state the group is in is then unknown. The owner's side is member.py.
"""

import json
import mmap
import os
import sys
from collections.abc import Callable, Sequence
from typing import IO, Any, Protocol

from streamrl.fabric.regions import Region, blocks


class Communicator(Protocol):
    """This process's place in a group."""

    staging: memoryview
    """Host memory of one block."""

    def broadcast(self, num_bytes: int) -> None:
        """The first bytes of rank 0's `staging` become those of everybody's. Returns when they are there."""

    def leave(self) -> None:
        """Gives the place up."""


class Network(Protocol):
    """How members of groups find each other."""

    def mint(self) -> bytes:
        """The unique id of a new group, in which this process will be rank 0."""

    def join(self, unique_id: bytes, rank: int, world_size: int) -> Communicator:
        """Returns when all of the group have joined."""


def run(open_network: Callable[[], Network]) -> int:
    """Answers until standard input ends.

    Args:
        open_network: called once, when nothing else can print on standard output any more.

    Returns:
        The exit code.
    """
    # Libraries print: what they say goes to the log.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        network = open_network()
        _answer(answers, {"ready": True})
        _answer_all(network, answers)
    except Exception as error:  # the outermost edge: the owner learns why it ended
        _answer(answers, {"error": f"{type(error).__name__}: {error}"})
        return 1
    return 0


def _answer_all(network: Network, answers: IO[str]) -> None:
    communicator: Communicator | None = None
    for line in sys.stdin:
        question = json.loads(line)
        match question["do"]:
            case "mint":
                _answer(answers, {"unique_id": network.mint().hex()})
            case "join":
                if communicator is not None:
                    communicator.leave()
                unique_id, rank = bytes.fromhex(question["unique_id"]), question["rank"]
                communicator = network.join(unique_id, rank, question["world_size"])
                is_sender = rank == 0
                _answer(answers, {"joined": True})
            case "move":
                assert communicator is not None, "not joined yet"
                regions = [Region(*region) for region in question["regions"]]
                _answer(answers, {"moved": move(communicator, question["path"], regions, is_sender=is_sender)})
            case unknown:
                raise ValueError(f"asked to {unknown!r}")


def move(communicator: Communicator, path: str, regions: Sequence[Region], *, is_sender: bool) -> int:
    """Sends the regions of a file to the group, or fills them with what is sent.

    Returns:
        Their bytes.

    Raises:
        OSError: the file is gone.
        ValueError: it is smaller than the regions say.
    """
    staging = communicator.staging
    num_bytes = 0
    with open(path, "rb" if is_sender else "r+b") as file:  # noqa: PTH123  (may be a link in /proc, not a path)
        access = mmap.ACCESS_READ if is_sender else mmap.ACCESS_WRITE
        with mmap.mmap(file.fileno(), 0, access=access) as memory, memoryview(memory) as view:
            if any(region.offset + region.num_bytes > len(view) for region in regions):
                raise ValueError(f"{path} has {len(view)} bytes: fewer than the version")
            for block in blocks(regions, len(staging)):
                block_bytes = sum(region.num_bytes for region in block)
                if is_sender:
                    _copy(block, view, staging)
                communicator.broadcast(block_bytes)
                if not is_sender:
                    _fill(block, view, staging)
                num_bytes += block_bytes
    return num_bytes


def _copy(block: Sequence[Region], view: memoryview, staging: memoryview) -> None:
    position = 0
    for offset, num_bytes in block:
        staging[position : position + num_bytes] = view[offset : offset + num_bytes]
        position += num_bytes


def _fill(block: Sequence[Region], view: memoryview, staging: memoryview) -> None:
    position = 0
    for offset, num_bytes in block:
        view[offset : offset + num_bytes] = staging[position : position + num_bytes]
        position += num_bytes


def _answer(answers: IO[str], answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _nccl() -> Network:
    from streamrl.fabric.nccl import NcclNetwork

    return NcclNetwork()


if __name__ == "__main__":
    sys.exit(run(_nccl))
