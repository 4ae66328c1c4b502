"""What a machine lacks."""

import json
import shutil
from pathlib import Path

import pytest

from streamrl.command.doctor import examine
from streamrl.command.main import run_command


def test_everything_that_is_missing_comes_with_a_remedy() -> None:
    findings = {finding.name: finding for finding in examine()}
    assert findings["Python"].ok and findings["torch"].ok and findings["vLLM"].ok
    assert all(finding.remedy for finding in findings.values() if not finding.ok)


def test_a_missing_requirement_makes_it_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["doctor", "--json"]) == (0 if shutil.which("g++") or shutil.which("c++") else 1)
    capsys.readouterr()
    monkeypatch.setenv("PATH", "")
    assert run_command(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["missing"] == ["compiler"]


def test_a_kafka_download_and_its_java_are_looked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("KAFKA_HOME", str(tmp_path / "nowhere"))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    findings = {finding.name: finding for finding in examine()}
    assert "openjdk" in findings["Java"].remedy
    assert "KAFKA_HOME is" in findings["Apache Kafka"].remedy
    assert not findings["Java"].required and not findings["Apache Kafka"].required
