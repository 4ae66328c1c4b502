"""`python -m benchmarks NAME`."""

import ast
from pathlib import Path

from benchmarks.__main__ import MODULES


def test_every_benchmark_has_a_name() -> None:
    modules = set()
    for path in Path("benchmarks").rglob("*.py"):
        tree = ast.parse(path.read_text())
        if any(
            isinstance(node, ast.FunctionDef) and node.name == "measure" and not node.args.args for node in tree.body
        ):
            modules.add(".".join(path.with_suffix("").parts))
    assert set(MODULES.values()) == modules
