"""Checkpoints that exist whole or not at all.

    checkpoints/attempt-0001-iteration-000012/
        manifest.json                 BLAKE3 of every other file; written last, then the folder is renamed
        state.json                    the trainer's own: iteration, data cursor, counters, Kafka positions
        random-0.safetensors          random states, one file a rank
        deepspeed/...                 weights, master weights, optimizer; DeepSpeed's pickles
    critic/deepspeed/...          the same of the critic, where there is one

Every rank writes into a folder with another ending, syncs and digests its share of the files; after that rank 0 writes
the manifest and renames. A crash at any point leaves a folder that nothing takes for a checkpoint, and the ones before
as they were. What is in the state is the trainer's business; here it is a dictionary.
"""

import json
import logging
import os
import random
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import safetensors.torch
import torch
from blake3 import blake3

from streamrl.errors import CheckpointError
from trainer_svc.ranks import Ranks

logger = logging.getLogger(__name__)

_NAME = re.compile(r"attempt-(\d+)-iteration-(\d+)")
_UNFINISHED = ".unfinished"
_DELETING = ".deleting"
_MANIFEST = "manifest.json"
_STATE = "state.json"


class Saved(Protocol):
    """What fills a checkpoint, on all ranks: all that learns."""

    def save(self, folder: Path) -> None:
        """Writes files into the folder; returns on every rank when all ranks have written."""

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote."""


def save_checkpoint(
    folder: Path, *, attempt: int, iteration: int, saved: Saved, state: Mapping[str, Any], keep: int, ranks: Ranks
) -> Path:
    """Makes a checkpoint and deletes all but the newest `keep`; returns its folder. Every rank calls it.

    One that this attempt has made at this iteration already is kept as it is.

    Args:
        folder: of all checkpoints, on a disk that every rank sees.
        state: anything JSON; rank 0's counts.
        keep: at least 1.

    Raises:
        OSError: the disk refused; no checkpoint has been made, and none deleted.
    """
    final = folder / f"attempt-{attempt:04d}-iteration-{iteration:06d}"
    if ranks.broadcast_bytes(b"exists" if ranks.rank == 0 and final.exists() else b"") == b"exists":
        return final
    unfinished = final.with_name(final.name + _UNFINISHED)
    if ranks.rank == 0:
        _remove_leftovers(folder)
        unfinished.mkdir(parents=True)
    ranks.barrier()
    saved.save(unfinished)
    safetensors.torch.save_file(_random_states(), unfinished / f"random-{ranks.rank}.safetensors")
    if ranks.rank == 0:
        (unfinished / _STATE).write_text(json.dumps(state, indent=1))
    ranks.barrier()
    digests = _digest_shares(unfinished, ranks, sync=True)
    if ranks.rank == 0:
        manifest = {"attempt": attempt, "iteration": iteration, "num_ranks": ranks.world_size, "digests": digests}
        (unfinished / _MANIFEST).write_text(json.dumps(manifest, indent=1))
        _sync(unfinished / _MANIFEST)
        for directory in {unfinished, *(path for path in unfinished.rglob("*") if path.is_dir())}:
            _sync(directory)
        unfinished.rename(final)
        _sync(folder)
        logger.info("checkpoint %s: %d files", final.name, len(digests) + 1)
        for old in checkpoints(folder)[:-keep]:
            _delete(old)
    ranks.barrier()
    return final


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first: by attempt, then by iteration."""
    if not folder.is_dir():
        return []
    numbered = [
        (int(match[1]), int(match[2]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))
    ]
    return [path for _, _, path in sorted(numbered)]


def attempt_of(checkpoint: Path) -> int:
    """The attempt that made a checkpoint."""
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None, f"{checkpoint} is no checkpoint's name"
    return int(match[1])


def load_state(checkpoint: Path) -> dict[str, Any]:
    """The state of a checkpoint alone, digest checked: what is needed before there is a policy. Not collective.

    Raises:
        CheckpointError: the file is damaged, or this is no checkpoint.
    """
    digests = _manifest(checkpoint)["digests"]
    if _STATE not in digests or _digest(checkpoint / _STATE) != digests[_STATE]:
        raise CheckpointError(f"{checkpoint / _STATE} is damaged: its digest differs from the manifest's")
    state: dict[str, Any] = json.loads((checkpoint / _STATE).read_text())
    return state


def load_checkpoint(checkpoint: Path, *, saved: Saved, ranks: Ranks) -> dict[str, Any]:
    """Loads what was saved and random states and returns the state. Every rank calls it.

    All digests are checked first, each rank its share: nothing is unpickled that differs from what was written.

    Raises:
        CheckpointError: a file is missing or damaged, or the number of ranks is another. Delete or move the folder to
            go on from the checkpoint before it.
    """
    manifest = _manifest(checkpoint)
    if manifest["num_ranks"] != ranks.world_size:
        raise CheckpointError(
            f"{checkpoint} was written by {manifest['num_ranks']} ranks and cannot be read by {ranks.world_size}: "
            f"set trainer.num_ranks to {manifest['num_ranks']}"
        )
    digests = _digest_shares(checkpoint, ranks, sync=False)
    wrong = sorted(
        name for name in {*digests, *manifest["digests"]} if digests.get(name) != manifest["digests"].get(name)
    )
    if wrong:
        raise CheckpointError(
            f"{checkpoint} is damaged: {', '.join(wrong)} differ from the manifest; "
            "delete or move this folder to resume from the checkpoint before it"
        )
    saved.load(checkpoint)
    _restore_random_states(safetensors.torch.load_file(checkpoint / f"random-{ranks.rank}.safetensors"))
    return load_state(checkpoint)


def _manifest(checkpoint: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((checkpoint / _MANIFEST).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{checkpoint} is no checkpoint: {error}") from error
    return manifest


def _digest_shares(checkpoint: Path, ranks: Ranks, *, sync: bool) -> dict[str, str]:
    """Digests of all files but the manifest, by relative name, on every rank; each rank reads its share."""
    names = sorted(
        str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file() and path.name != _MANIFEST
    )
    names = json.loads(ranks.broadcast_bytes(json.dumps(names).encode() if ranks.rank == 0 else None))
    digests = {}
    for name in names[ranks.rank :: ranks.world_size]:
        if sync:
            _sync(checkpoint / name)
        digests[name] = _digest(checkpoint / name)
    gathered = ranks.gather_bytes(json.dumps(digests).encode())
    return {name: digest for share in gathered for name, digest in json.loads(share).items()}


def _digest(path: Path) -> str:
    digest = blake3()
    digest.update_mmap(path)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    """Flushes a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _delete(checkpoint: Path) -> None:
    # Renamed first: half a checkpoint must not look like one.
    doomed = checkpoint.with_name(checkpoint.name + _DELETING)
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)


def _remove_leftovers(folder: Path) -> None:
    for ending in (_UNFINISHED, _DELETING):
        for path in folder.glob(f"*{ending}"):
            shutil.rmtree(path)


def _random_states() -> dict[str, torch.Tensor]:
    """States of the generators of torch (CPU, and CUDA's current device), Python and NumPy."""
    version, words, gauss_next = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss_next is None else [gauss_next], dtype=torch.float64),
        "numpy": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
        "numpy_position": torch.tensor([numpy_state["state"]["pos"], numpy_state["has_gauss"]]),
        "numpy_gauss": torch.tensor([numpy_state["gauss"]], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_random_states(states: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["torch"])
    version, *words = states["python"].tolist()
    gauss = states["python_gauss"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    position, has_gauss = states["numpy_position"].tolist()
    np.random.set_state(
        {
            "bit_generator": "MT19937",
            "state": {"key": states["numpy"].numpy().astype(np.uint32), "pos": position},
            "has_gauss": has_gauss,
            "gauss": float(states["numpy_gauss"]),
        }
    )
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
