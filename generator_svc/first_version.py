"""The version that an instance starts with, and the model's files that come with it."""

from collections.abc import Iterable
from pathlib import Path, PurePath

from generator_svc.weights_client import WeightsClient
from streamrl.digest import tokenizer_digest
from streamrl.errors import RefusedError
from streamrl.v1.weights_pb2 import ModelFile, VersionManifest


class FirstVersion:
    """Config and tokenizer on disk, in a folder of the instance's own; the weights are still with weights_svc."""

    def __init__(self, manifest: VersionManifest, files: Iterable[ModelFile], model_folder: Path) -> None:
        self.manifest = manifest
        self.model_folder = model_folder
        self.tokenizer_digest = tokenizer_digest(files)

    @classmethod
    async def wait_for(cls, weights: WeightsClient, model_folder: Path) -> "FirstVersion":
        """Waits until there is a version, and writes the model's files.

        Raises:
            UnavailableError: weights_svc does not answer.
            RefusedError: it gives files with names that are none.
        """
        await weights.wait_for_first_version()
        plan = await weights.negotiate(with_files=True)
        write_files(plan.files, model_folder)
        return cls(plan.manifest, plan.files, model_folder)


def write_files(files: Iterable[ModelFile], folder: Path) -> None:
    """Writes the files of a model into a folder, which is made.

    Raises:
        RefusedError: a name is not that of a file inside the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        if not file.name or PurePath(file.name).name != file.name or file.name in (".", ".."):
            raise RefusedError(f"weights_svc gives a model file named {file.name!r}: expected a plain file name")
        (folder / file.name).write_bytes(file.content)
