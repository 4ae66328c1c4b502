"""The steps of deploy/Dockerfile, run for the CPU variant on a machine that has nothing but Debian and Python."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.deploy.dockerfile import CleanMachine, configuration, read_stages

ROOT = Path(__file__).parents[2]
STAGES = read_stages((ROOT / "deploy" / "Dockerfile").read_text())
TARGETS = ("scheduler", "weights", "trainer", "generator", "tracker")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    missing = [tool for tool in ("debootstrap", "unshare", "chroot") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        reason = f"needs {', '.join(missing) or 'root'}: images are built in a bare Debian by chroot"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("images")
    machine = CleanMachine(STAGES, _context(folder / "context"), _made(folder / "layers"))
    yield machine
    shutil.rmtree(folder)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _context(folder: Path) -> Path:
    """What deploy/Dockerfile.dockerignore lets through."""
    lines = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
    for name in [line.removeprefix("!") for line in lines if line.startswith("!")]:
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    return folder


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_builds_and_its_command_answers(machine, target):
    machine.build(target)
    settings = configuration(STAGES, target)
    assert "usage" in machine.run(target, [*settings.entrypoint, "--help"]).lower()
    assert machine.run(target, ["id", "-u"]).strip() == "10001"


@pytest.mark.parametrize("target", ["trainer", "generator"])
def test_the_libraries_of_a_model_load_where_they_will_run(machine, target):
    machine.build(target)
    script = "import torch, vllm._C, deepspeed, transformers, mlflow, math_verify, reasoning_gym; print('loaded')"
    assert "loaded" in machine.run(target, ["python", "-c", script])


def test_the_laptop_example_runs_in_the_image_of_trainer_and_generators(machine):
    machine.build("trainer")
    few = ["--set", "trainer.num_iterations=2", "--set", "eval.every=0", "--set", "eval.num_prompts=32"]
    command = ["streamrl", "run", "examples/laptop.toml", "--json", *few]
    last_line = machine.run("trainer", command, mounted={ROOT / "examples": "/experiment/examples"}).splitlines()[-1]
    assert json.loads(last_line)["status"] == "completed"


@pytest.mark.parametrize("target", ["scheduler", "weights"])
def test_a_service_without_a_model_starts_from_its_settings(machine, target):
    machine.build(target)
    script = f"import sys, {target}_svc.main; sys.exit(any(name in sys.modules for name in ('torch', 'vllm')))"
    machine.run(target, ["python", "-c", script])
