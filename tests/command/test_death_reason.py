"""Why a service ended, in words."""

import json
from pathlib import Path

import pytest

from streamrl.command.death_reason import death_reason
from streamrl.run_folder import RunFolder

ENGINE_LOG = """\
2026-11-29T17:03:29Z generator-0 INFO generator_svc.main: starting
(EngineCore pid=31) ERROR 11-29 17:03:29 [core.py:1510]     raise ValueError(
(EngineCore pid=31) ERROR 11-29 17:03:29 [core.py:1510] ValueError: No available memory for the cache blocks.
Traceback (most recent call last):
  File "core.py", line 3, in run
RuntimeError: Engine core initialization failed.
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    folder.error_file("x").parent.mkdir()
    return folder


def _error(folder: RunFolder, kind: str, message: str) -> None:
    folder.error_file("x").write_text(json.dumps({"kind": kind, "message": message}))


def test_a_services_own_words_come_with_the_first_error_below_it(folder: RunFolder) -> None:
    folder.log("x").write_text(ENGINE_LOG)
    _error(folder, "EngineDiedError", "the inference engine did not start")
    assert death_reason(folder, "x", 1, 0) == (
        "the inference engine did not start; the first error in its log: "
        "ValueError: No available memory for the cache blocks."
    )


def test_bad_input_is_told_as_it_is(folder: RunFolder) -> None:
    folder.log("x").write_text(ENGINE_LOG)
    _error(folder, "bad_input", "no such file")
    assert death_reason(folder, "x", 2, 0) == "no such file"


def test_an_error_is_not_told_twice(folder: RunFolder) -> None:
    folder.log("x").write_text("KeyError: 'a'\n")
    _error(folder, "KeyError", "KeyError: 'a'")
    assert death_reason(folder, "x", 1, 0) == "KeyError: 'a'"


def test_only_the_log_of_this_life_counts(folder: RunFolder) -> None:
    earlier = "OldError: of another life\n"
    folder.log("x").write_text(f"{earlier}cannot open\nthe door\n")
    assert death_reason(folder, "x", 3, len(earlier)) == "exit code 3: cannot open / the door"


def test_a_service_without_a_word_is_told_by_its_exit(folder: RunFolder) -> None:
    assert death_reason(folder, "x", 1, 0) == "exit code 1"
    assert death_reason(folder, "x", -9, 0) == "killed by signal SIGKILL"
    assert death_reason(folder, "x", -63, 0) == "killed by signal 63"
