"""The run's model as a folder in Hugging Face's layout: config, tokenizer and weights."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from streamrl.v1.weights_pb2 import ModelFile


def save_final_model(folder: Path, tensors: Sequence[tuple[str, Tensor]], files: Sequence[ModelFile]) -> None:
    """Writes the folder whole or not at all; one that is there already is replaced.

    Args:
        tensors: by name, on the CPU.
        files: what belongs to the model beside them.
    """
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    for file in files:
        (unfinished / file.name).write_bytes(file.content)
    save_file(dict(tensors), unfinished / "model.safetensors", metadata={"format": "pt"})
    for path in (*unfinished.iterdir(), unfinished):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    if folder.exists():
        shutil.rmtree(folder)
    unfinished.rename(folder)
