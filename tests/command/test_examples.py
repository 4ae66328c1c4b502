"""Every example can be resolved."""

from pathlib import Path

import pytest

from streamrl.command.resolve import resolve

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_resolves(example: Path) -> None:
    resolve(example, [])


def test_there_are_examples() -> None:
    assert EXAMPLES
