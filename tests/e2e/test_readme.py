"""What the README tells a new user to do, done."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamrl.command.main import run_command

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def block(language: str, first_line: str) -> str:
    """The code block of a language that begins with a line."""
    for found in re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL):
        if found.startswith(first_line):
            return str(found)
    raise AssertionError(f"the README has no {language} block that begins with {first_line!r}")


def test_every_subcommand_and_target_that_the_readme_names_exists(capsys: pytest.CaptureFixture[str]) -> None:
    subcommands = set(re.findall(r"`?streamrl ([a-z]+)", README)) - {"runs"}
    assert {"run", "status", "stop", "serve", "doctor"} <= subcommands
    for subcommand in sorted(subcommands):
        with pytest.raises(SystemExit) as ended:
            run_command([subcommand, "--help"])
        assert ended.value.code == 0, subcommand
    capsys.readouterr()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([a-z0-9-]+)|`make ([a-z0-9-]+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{''.join(target)}:", makefile, flags=re.MULTILINE), target


def test_every_file_that_the_readme_links_to_exists() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ones_own_questions_and_reward_train_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_run: Callable[..., Any]
) -> None:
    """The README's settings and reward, with two files of questions and a model that needs no hub."""
    settings = tmp_path / "my.toml"
    settings.write_text(block("toml", "# my.toml"))
    (tmp_path / "my_rewards.py").write_text(block("python", "# my_rewards.py"))
    for name, count in (("my_questions.jsonl", 40), ("my_held_out_questions.jsonl", 8)):
        rows = [
            {"question": f"to {count + index} from {index}", "answer": str(count + index)} for index in range(count)
        ]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    small = {"model.path": "tiny", "model.dtype": "float32", "generator.engine": "fake", "generator.max_tokens": 64}

    checked = subprocess.run(
        [sys.executable, "-m", "streamrl.command.main", "run", "my.toml", "--dry-run"]
        + [argument for name, value in small.items() for argument in ("--set", f"{name}={value}")],
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stderr

    batch = {"data.prompts_per_batch": 4, "data.samples_per_prompt": 2}
    run = start_run({**small, **batch, "trainer.num_iterations": 2}, config=settings)
    summary = run.finish()
    assert run.process.returncode == 0, run.log()
    assert summary["rollouts"]["trained"] == 16
    assert summary["eval"]["num_prompts"] == 8
