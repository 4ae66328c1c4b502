"""An engine of some settings, measured by itself; and what is saved of it."""

import json
from pathlib import Path

import pytest

from generator_svc.engines import check
from generator_svc.measure import main
from generator_svc.settings import GeneratorSettings
from streamrl.engine_profile import from_file, to_json
from streamrl.v1.scheduler_pb2 import EngineProfile, StepLatency


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 50, "max_position_embeddings": 64}))
    return tmp_path


def settings_file(folder: Path, **generator: object) -> Path:
    file = folder / "settings.json"
    settings = {"generator": {"engine": "fake", "max_running": 8, "fake_step_ms": {1: 2.0, 8: 4.0}, **generator}}
    file.write_text(json.dumps(settings))
    return file


def test_an_engine_is_measured_without_any_other_service(model_folder: Path) -> None:
    result = model_folder / "result.json"
    assert main([str(settings_file(model_folder)), str(model_folder), str(result)]) == 0
    found = json.loads(result.read_text())
    assert (found["engine"], found["max_running"], found["ptl_ms"]["1"], found["ptl_ms"]["8"]) == ("fake", 8, 2.0, 4.0)
    # What is written can be used.
    check(GeneratorSettings.model_validate({"generator": {"engine": "fake", "profile": result}}))
    assert [step.batch_size for step in from_file(result).steps] == [1, 2, 4, 8]


def test_what_cannot_be_measured_is_bad_input(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model_folder / "config.json").unlink()
    assert main([str(settings_file(model_folder)), str(model_folder), str(model_folder / "result.json")]) == 2
    assert "config.json is missing" in capsys.readouterr().err


def test_a_profile_is_the_same_when_it_is_read_again(tmp_path: Path) -> None:
    steps = [StepLatency(batch_size=4, latency_s=0.01, num_steps=9, held_tokens=1000.0)]
    profile = EngineProfile(steps=steps, held_token_s=2e-6, prefill_token_s=3e-4)
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(to_json(profile)))
    read = from_file(file)
    assert (read.held_token_s, read.prefill_token_s) == pytest.approx((2e-6, 3e-4))
    # Without what the tokens in the cache cost: here a fifth of the step.
    assert read.steps[0].latency_s == pytest.approx(0.008)
    assert to_json(read) == to_json(profile)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "is no profile"),
        ('{"ptl_ms": {"1": 1e300}}', r"no profile .*: ptl_ms: 1: Input should be less than or equal to 3600000"),
        ('{"ptl_ms": {"99999999999": 1}}', r"no profile .*: ptl_ms: 99999999999: .* less than or equal to 2147483647"),
        ('{"ptl_ms": {}}', "ptl_ms"),
        ('{"ptl_ms": {"0": 1}}', "ptl_ms"),
        ('{"ptl_ms": {"1": -1}}', "ptl_ms"),
        ('{"ptl_ms": {"1": 1}, "held_token_ms": -1}', "held_token_ms"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_before_anything_starts(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "profile.json"
    file.write_text(text)
    for engine_check in (lambda: from_file(file), lambda: check(settings_with(file))):
        with pytest.raises(ValueError, match=message):
            engine_check()
    with pytest.raises(ValueError, match="cannot be read"):
        from_file(tmp_path / "missing")


def settings_with(profile: Path) -> GeneratorSettings:
    return GeneratorSettings.model_validate({"generator": {"engine": "fake", "profile": profile}})
