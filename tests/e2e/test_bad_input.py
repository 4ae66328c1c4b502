"""What users get wrong ends the command at once, with one message that says what to do, and leaves nothing behind."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(60)]

LAPTOP = Path(__file__).parents[2] / "examples" / "laptop.toml"


@pytest.fixture
def taken_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


def run(tmp_path: Path, *settings: str) -> tuple[int, dict]:
    command = [
        sys.executable,
        "-m",
        "streamrl.command.main",
        "run",
        str(LAPTOP),
        "--json",
        "--set",
        f"run.dir={tmp_path}",
    ]
    for setting in settings:
        command += ["--set", setting]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    lines = done.stdout.splitlines()
    assert len(lines) == 1, done.stdout + done.stderr
    return done.returncode, json.loads(lines[0])


def without_answers(tmp_path: Path) -> str:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"prompt": "to 3 from 1", "solution": "2 3"}\n')
    return str(path)


@pytest.mark.parametrize(
    ("setting", "kind", "words"),
    [
        ("trainer.learning_rat=1e-4", "bad_input", ["learning_rat", "learning_rate"]),
        ("trainr.learning_rate=1e-4", "bad_input", ["trainr", "trainer"]),
        ("data.train=/nowhere/prompts.jsonl", "bad_input", ["/nowhere/prompts.jsonl"]),
        ("data.samples_per_prompt=1", "bad_input", ["samples_per_prompt", "2"]),
        ("generator.top_p=0.9", "bad_input", ["top_p", "log-probs"]),
        ("generator.top_k=20", "bad_input", ["top_k", "log-probs"]),
        ("trainer.algorithm=gprp", "bad_input", ["gprp", "grpo"]),
        ("trainer.num_iterations=0", "bad_input", ["num_iterations"]),
        ("pipeline.max_staleness=0", "bad_input", ["max_staleness", "sync"]),
        ("model.path=/nowhere/model", "bad_input", ["/nowhere/model"]),
        ("reward.functions=no_such_module:reward", "bad_input", ["no_such_module"]),
        ("kafka.client={ 'no.such' = 1 }", "bad_input", ["kafka.client", "no.such"]),
        ("generator.max_model_len=60", "bad_input", ["generator.max_model_len", "generator.max_tokens"]),
        ("scheduler.lease_s=inf", "bad_input", ["lease_s"]),
        ("reward.functions=exact_mach", "bad_input", ["exact_mach", "exact_match"]),
        ("kafka.bootstrap_servers=127.0.0.1:1", "BrokerUnavailableError", ["127.0.0.1:1", "kafka.bootstrap_servers"]),
    ],
)
def test_bad_input_is_refused_with_what_to_do(tmp_path: Path, setting: str, kind: str, words: list[str]) -> None:
    code, answer = run(tmp_path, setting)
    assert code == (2 if kind == "bad_input" else 1), answer
    assert answer["status"] == "failed"
    assert answer["error"]["kind"] == kind
    for word in words:
        assert word in answer["error"]["message"]


def test_a_data_set_without_the_named_field_is_refused_with_those_that_it_has(tmp_path: Path) -> None:
    path = without_answers(tmp_path)
    code, answer = run(tmp_path, f"data.train={path}", f"data.eval={path}")
    assert code == 2
    assert "answer" in answer["error"]["message"] and "solution" in answer["error"]["message"]


def test_a_port_in_use_is_refused_before_anything_starts(tmp_path: Path, taken_port: int) -> None:
    code, answer = run(tmp_path, f"rpc.scheduler_address=127.0.0.1:{taken_port}")
    assert code == 2
    assert str(taken_port) in answer["error"]["message"] and "in use" in answer["error"]["message"]


def test_a_settings_file_that_is_missing_or_broken_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text("[trainer\nlearning_rate = 1")
    for path in (tmp_path / "missing.toml", broken):
        done = subprocess.run(
            [sys.executable, "-m", "streamrl.command.main", "run", str(path), "--json"], capture_output=True, text=True
        )
        assert done.returncode == 2
        assert str(path) in json.loads(done.stdout)["error"]["message"]
