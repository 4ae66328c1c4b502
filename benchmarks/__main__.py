"""`python -m benchmarks NAME [--json]`: exit code 0 when it measured, whether or not the goals are met."""

import argparse
import ast
import importlib
import sys
from importlib.util import find_spec
from pathlib import Path

from benchmarks.result import Result

MODULES = {
    "peers": "benchmarks.peers.comparison",
    "replay": "benchmarks.replay.comparison",
    **{
        name: f"benchmarks.{name}"
        for name in ("laptop_dispatch", "length_ranker", "sites", "skewness", "throughput", "trainer", "weights")
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog=_listed(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=sorted(MODULES))
    parser.add_argument("--json", action="store_true", help="one line of JSON at the end, and nothing else on stdout")
    arguments = parser.parse_args()
    result: Result = importlib.import_module(MODULES[arguments.name]).measure()
    sys.stdout.write((result.line() if arguments.json else _table(result)) + "\n")
    return 0


def _listed() -> str:
    """A line for each: the first of its docstring, without importing it."""
    width = max(map(len, MODULES))
    return "\n".join(f"{name:{width}}  {_first_line(module)}" for name, module in sorted(MODULES.items()))


def _first_line(module: str) -> str:
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None, module
    return (ast.get_docstring(ast.parse(Path(spec.origin).read_text())) or "").partition("\n")[0]


def _table(result: Result) -> str:
    lines = [f"{result.benchmark} {result.settings}"]
    for cell in result.cells:
        told = "" if cell.ratio is None else f"  {cell.ratio:.2f} of {cell.against}"
        told += "" if cell.met is None else f", goal {cell.goal:g}: " + ("met" if cell.met else "missed")
        lines.append(f"{cell.name:32} {cell.value:12.4g} {cell.unit}{told}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
