"""The command line itself: help at once, bad arguments told like any other bad input."""

import json
import subprocess
import sys

import pytest

from streamrl.command.main import run_command


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from streamrl.command.main import run_command\n"
        "try: run_command(['run', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted(set(sys.modules) & {'pydantic', 'grpc', 'torch', 'vllm', 'rich', 'confluent_kafka'}))"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "--dry-run" in shown
    assert shown.splitlines()[-1] == "[]"


@pytest.mark.parametrize("arguments", [["run"], ["walk"], [], ["serve", "cook", "x.toml"], ["run", "x.toml", "--what"]])
def test_bad_arguments_are_bad_input(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command([*arguments, "--json"]) == 2
    written = capsys.readouterr()
    (line,) = written.out.splitlines()
    assert json.loads(line)["error"]["kind"] == "bad_input"
    assert written.err.startswith("error: ")


def test_without_json_standard_output_stays_empty_on_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["run", "/nowhere.toml"]) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert "settings file /nowhere.toml is missing" in written.err


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run_command(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("streamrl 0.")
