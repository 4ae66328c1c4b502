"""`python -m benchmarks NAME`."""

import ast
import re
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import MODULES, main


def test_every_benchmark_has_a_name() -> None:
    modules = set()
    for path in Path("benchmarks").rglob("*.py"):
        tree = ast.parse(path.read_text())
        if any(
            isinstance(node, ast.FunctionDef) and node.name == "measure" and not node.args.args for node in tree.body
        ):
            modules.add(".".join(path.with_suffix("").parts))
    assert set(MODULES.values()) == modules


def test_help_says_what_each_measures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--help"])
    with pytest.raises(SystemExit):
        main()
    told = capsys.readouterr().out
    for name in MODULES:
        assert re.search(rf"^{name} +[A-Z].*[.]$", told, re.MULTILINE), told
