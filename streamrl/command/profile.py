"""`streamrl profile`: starts one engine of the settings, measures how fast it is, and says so as JSON."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from streamrl import lifetime
from streamrl.command.report import EXIT_BAD_INPUT, EXIT_COMPLETED, write_error, write_json
from streamrl.command.resolve import resolve
from streamrl.command.settings import Settings
from streamrl.errors import EngineDiedError
from streamrl.run_folder import write_private


def profile(arguments: Namespace) -> int:
    """Writes the profile to standard output, and to a file if one is named.

    Raises:
        ValueError: the settings, the model or the file cannot be used.
        EngineDiedError: the engine did not start, or died.
    """
    settings = resolve(arguments.config, arguments.set)
    if settings.generator.profile_s <= 0:
        raise ValueError("generator.profile_s is 0: how long may it take to measure? Try 10")
    if arguments.out is not None:
        _check_writable(arguments.out)
    with TemporaryDirectory(prefix="streamrl-profile-") as folder:
        found = _measure(settings, Path(folder))
    if arguments.out is not None:
        try:
            arguments.out.write_text(json.dumps(found, indent=2) + "\n")
        except OSError as error:
            raise ValueError(f"{arguments.out} cannot be written: {error}") from error
    write_json(found)
    return EXIT_COMPLETED


def _check_writable(file: Path) -> None:
    """Before anything is measured for it; what is there stays, and nothing else is left."""
    was_there = file.exists()
    try:
        with file.open("a"):
            pass
        if not was_there:
            file.unlink()
    except OSError as error:
        raise ValueError(f"{file} cannot be written: {error.strerror}") from error


def _measure(settings: Settings, folder: Path) -> dict[str, Any]:
    from trainer_svc.model_cache import default_cache_folder
    from trainer_svc.models import resolve_model

    model = resolve_model(
        settings.model.path,
        dtype=settings.model.dtype,
        seed=settings.run.seed,
        cache_folder=default_cache_folder(),
        report=write_error,
    )
    model_folder = folder / "model"
    model_folder.mkdir()
    for name, content in model.files.items():
        (model_folder / name).write_bytes(content)
    settings_file, result, log = folder / "settings.json", folder / "result.json", folder / "log"
    # What was saved before is not what is asked for.
    generator = settings.generator.model_copy(update={"profile": None})
    write_private(settings_file, settings.model_copy(update={"generator": generator}).model_dump_json())
    write_error("an engine is started and measured")
    process = lifetime.spawn(
        [sys.executable, "-m", "generator_svc.measure", str(settings_file), str(model_folder), str(result)], log=log
    )
    try:
        exit_code = process.wait()
    finally:
        process.kill()
        process.wait()
    if exit_code:
        lines = log.read_text(errors="replace").splitlines() or ["it has said nothing"]
        if exit_code == EXIT_BAD_INPUT:
            raise ValueError(lines[-1])
        raise EngineDiedError(f"measuring failed (exit code {exit_code}): {' / '.join(lines[-5:])}")
    found: dict[str, Any] = json.loads(result.read_text())
    return found
