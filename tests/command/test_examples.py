"""Every example passes its dry run."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.command.resolve import resolve
from streamrl.kafka.topics import Topics

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_passes_its_dry_run(example: Path) -> None:
    model = resolve(example, []).model.path
    if model.startswith("package:") and importlib.util.find_spec(model.removeprefix("package:")) is None:
        pytest.skip(f"{model} is not installed: make smollm2 brings it")
    command = [sys.executable, "-m", "streamrl.command.main", "run", str(example), "--dry-run", "--json"]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "checked"


def test_there_are_examples() -> None:
    assert EXAMPLES


def test_the_mirrors_of_two_sites_carry_each_topic_one_way_and_prompts_nowhere() -> None:
    text = (ROOT / "examples" / "two_sites.properties").read_text()
    ways = dict(re.findall(r"(?m)^(\S+->\S+)\.topics = (.+)$", text.replace("\\\\", "\\")))
    carried = {
        way: {topic for topic in Topics("two-sites").all if re.fullmatch(pattern, topic)}
        for way, pattern in ways.items()
    }
    topics = Topics("two-sites")
    assert carried == {
        "training->generation": {topics.assignments},
        "generation->training": {topics.rollouts, topics.dead_letters, topics.spans},
    }
