import subprocess
from pathlib import Path

import pytest

from tests.deploy.schemas import ROOT, skip_or_fail

DEPLOY = ROOT / "deploy"


@pytest.mark.parametrize(
    "command",
    [
        ("hadolint", "--config", "deploy/.hadolint.yaml", "deploy/Dockerfile"),
        ("yamllint", "--strict", "--config-file", "deploy/.yamllint.yaml", "deploy"),
    ],
    ids=lambda command: command[0],
)
def test_a_linter_has_nothing_to_say(command):
    program = ROOT / ".venv" / "bin" / command[0]
    if not program.exists():
        skip_or_fail(f"{program} is not there: make install-dev brings it")
    done = subprocess.run([program, *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_scripts_can_be_run():
    for script in DEPLOY.glob("*.sh"):
        assert Path(script).stat().st_mode & 0o111
