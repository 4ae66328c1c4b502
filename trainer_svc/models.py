"""What `model.path` stands for: a folder, a hub name, `tiny`, or `package:NAME`.

Whatever it is, it becomes a folder in Hugging Face's layout; from there the trainer loads weights, and the small files
(config, tokenizer) travel with weight version 0 to generators that have none of this.
"""

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.hub_name import is_hub_name
from trainer_svc.packaged_model import find_packaged_model, packaged_model_folder, packaged_model_place

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

TINY = "tiny"
PACKAGE = "package:"
_HUB_TIMEOUT_S = 5.0
_CONFIG_FILE = "config.json"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
)
_SMALL_FILES = (_CONFIG_FILE, "generation_config.json", *_TOKENIZER_FILES)
# Any of these makes a tokenizer.
_VOCABULARY_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")


@dataclass(frozen=True)
class ModelFiles:
    """A model that is on this machine's disk."""

    folder: Path
    dtype: str
    """As it is to be loaded and published: `float32` or `bfloat16`."""
    files: Mapping[str, bytes]
    """Small files by name, for weight version 0. The config says `dtype`, whatever the folder's says."""
    tokenizer: Any
    """Of transformers."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end an answer, by the model's own files."""
    max_context_tokens: int | None
    """Longest prompt and answer together; None: the config does not say."""

    def load_model(self) -> "PreTrainedModel":
        """The model with its weights, in `dtype`, on the CPU, ready to be trained.

        Raises:
            ValueError: the weights are damaged, or are those of another architecture.
        """
        import torch
        from safetensors import SafetensorError
        from transformers import AutoModelForCausalLM

        with _quiet_progress():
            try:
                model, loading = AutoModelForCausalLM.from_pretrained(
                    self.folder, dtype=getattr(torch, self.dtype), local_files_only=True, output_loading_info=True
                )
            except (OSError, ValueError, RuntimeError, SafetensorError) as error:
                raise ValueError(f"model.path: the model in {self.folder} does not load: {_brief(error)}") from error
        # transformers fills what is missing with random numbers, and only warns.
        missing = sorted(loading["missing_keys"])
        if missing:
            raise ValueError(
                f"model.path: the weights in {self.folder} lack {len(missing)} tensors of {type(model).__name__}: "
                f"{', '.join(missing[:5])}"
            )
        if loading["unexpected_keys"]:
            logger.warning("%d tensors in %s are not used", len(loading["unexpected_keys"]), self.folder)
        model.train()
        trained: PreTrainedModel = model
        return trained


def resolve_model(
    path: str, *, dtype: str, seed: int, cache_folder: Path, report: Callable[[str], None] = logger.info
) -> ModelFiles:
    """Finds, downloads or makes the model, and loads its tokenizer.

    Args:
        path: `model.path` of the settings.
        dtype: `float32` or `bfloat16`.
        seed: of a model that is made on the spot.
        cache_folder: where such models are kept; see `model_cache.default_cache_folder`.
        report: told in sentences how far the making of a model is.

    Raises:
        ValueError: there is no such model, it cannot be reached, or it cannot be trained; says what to do.
    """
    check_model(path)
    with _quiet_progress():
        folder = _folder(path, seed, cache_folder, report)
    config = _check_folder(folder)
    files = {name: (folder / name).read_bytes() for name in _SMALL_FILES if (folder / name).is_file()}
    files[_CONFIG_FILE] = _config_with_dtype(config, dtype)
    tokenizer = _load_tokenizer(folder)
    return ModelFiles(
        folder=folder,
        dtype=dtype,
        files=files,
        tokenizer=tokenizer,
        stop_token_ids=_stop_token_ids(folder, files, tokenizer),
        max_context_tokens=config.get("max_position_embeddings"),
    )


def check_model(path: str) -> None:
    """Looks whether `model.path` can be what it says, without a network and without loading anything.

    Raises:
        ValueError: it cannot.
    """
    if path == TINY:
        return
    if path.startswith(PACKAGE):
        find_packaged_model(path.removeprefix(PACKAGE))
        return
    folder = Path(path).expanduser()
    if folder.is_dir():
        _check_folder(folder)
    elif folder.exists():
        raise ValueError(
            f"model.path: {path} is a file, expected a folder in Hugging Face's layout with {_CONFIG_FILE}"
        )
    elif not is_hub_name(path):
        raise ValueError(
            f"model.path: there is no folder {path} (looked in {Path.cwd()}), and it is no hub name (owner/name), "
            f"{TINY}, or {PACKAGE}NAME"
        )


def stop_token_ids(model: ModelFiles, texts: Sequence[str]) -> list[int]:
    """All tokens that end an answer: the model's own, and the settings' texts of one token each.

    Raises:
        ValueError: a text is not one token.
    """
    ids = list(model.stop_token_ids)
    for text in texts:
        of_text = model.tokenizer.encode(text, add_special_tokens=False)
        if len(of_text) != 1:
            raise ValueError(f"data.stop: expected texts of one token each, and {text!r} is {len(of_text)} tokens")
        ids.extend(of_text)
    return sorted(set(ids))


def local_folder(path: str, seed: int, cache_folder: Path) -> Path | None:
    """Where the model is, if it is on this machine already; None: it has to be made, unpacked or downloaded first.

    Raises:
        ValueError: `path` is no name that a model can have.
    """
    if path == TINY:
        from trainer_svc.tiny_model import tiny_model_place

        place = tiny_model_place(cache_folder, seed)
    elif path.startswith(PACKAGE):
        place = packaged_model_place(path.removeprefix(PACKAGE), cache_folder)
    else:
        place = Path(path).expanduser()
        if not place.is_dir():
            from huggingface_hub import try_to_load_from_cache

            config = try_to_load_from_cache(path, _CONFIG_FILE)
            return Path(config).parent if isinstance(config, str) else None
    return place if place.is_dir() else None


def _folder(path: str, seed: int, cache_folder: Path, report: Callable[[str], None]) -> Path:
    """Where the model is, once it is there."""
    if path == TINY:
        from trainer_svc.tiny_model import tiny_model_folder

        return tiny_model_folder(cache_folder, seed, report)
    if path.startswith(PACKAGE):
        return packaged_model_folder(path.removeprefix(PACKAGE), cache_folder)
    if Path(path).expanduser().is_dir():
        return Path(path).expanduser().resolve()
    return _download(path)


def _check_folder(folder: Path) -> dict[str, Any]:
    """The config of a folder that holds a trainable model."""
    file = folder / _CONFIG_FILE
    if not file.is_file():
        raise ValueError(
            f"model.path: folder {folder} has no {_CONFIG_FILE}: expected a model in Hugging Face's layout"
        )
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"model.path: {file} is not JSON: {error}") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ValueError(f"model.path: {file} names no model_type: expected a model's config")
    if "auto_map" in config:
        raise ValueError(
            f"model.path: {folder} brings code of its own, which is not run; take a model transformers has"
        )
    if "quantization_config" in config:
        raise ValueError(f"model.path: the weights in {folder} are quantised and cannot be trained; take the original")
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"model.path: folder {folder} has no weights: expected .safetensors files")
    if not any((folder / name).is_file() for name in _VOCABULARY_FILES):
        raise ValueError(
            f"model.path: folder {folder} has no tokenizer: expected one of {', '.join(_VOCABULARY_FILES)}"
        )
    return config


def _download(name: str) -> Path:
    """The folder of a hub model: downloaded, or as it is in the hub's own cache when the hub cannot be reached."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    missing = f"model.path: there is no folder {name} (looked in {Path.cwd()})"
    logger.info("looking for %s on the hub", name)
    try:
        return Path(
            snapshot_download(name, allow_patterns=[*_SMALL_FILES, "*.safetensors*"], etag_timeout=_HUB_TIMEOUT_S)
        )
    except RepositoryNotFoundError as error:
        raise ValueError(f"{missing}, and the hub has no public model of that name: {_brief(error)}") from error
    except (OSError, HfHubHTTPError, ValueError) as error:
        raise ValueError(
            f"{missing}, and the hub does not give it ({_brief(error)}). Download it where there is a network and give "
            f"the folder, or take {TINY}"
        ) from error


# What tokenizer_config.json names when tokenizer.json says all.
_GENERIC_TOKENIZERS = ("TokenizersBackend", "PreTrainedTokenizerFast")


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        # AutoTokenizer gives some architectures (Qwen2) their family's own tokenizer whatever the files say: it would
        # split this folder's words into others.
        config = folder / "tokenizer_config.json"
        named = json.loads(config.read_text()).get("tokenizer_class") if config.is_file() else None
        if named in _GENERIC_TOKENIZERS and (folder / "tokenizer.json").is_file():
            return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"model.path: the tokenizer in {folder} does not load: {_brief(error)}") from error


def _config_with_dtype(config: Mapping[str, Any], dtype: str) -> bytes:
    """The config as generators are to see it: they take the dtype from it."""
    kept = {key: value for key, value in config.items() if key != "torch_dtype"}
    return json.dumps({**kept, "dtype": dtype}, indent=2, sort_keys=True).encode()


def _stop_token_ids(folder: Path, files: Mapping[str, bytes], tokenizer: Any) -> tuple[int, ...]:
    found = {tokenizer.eos_token_id} - {None}
    for name in (_CONFIG_FILE, "generation_config.json"):
        ids = json.loads(files.get(name, b"{}")).get("eos_token_id")
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    if not found:
        raise ValueError(
            f"model.path: the model in {folder} names no end token (eos_token_id): answers would never end"
        )
    return tuple(sorted(found))


@contextlib.contextmanager
def _quiet_progress() -> Iterator[None]:
    """Keeps progress bars of the libraries out of the logs."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )
    from transformers.utils import logging as transformers_logging

    hub_was_quiet = are_progress_bars_disabled()
    disable_progress_bars()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()
        if not hub_was_quiet:
            enable_progress_bars()


def _brief(error: Exception) -> str:
    """The first line of a library's error, which may go on for pages."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
