"""The command `streamrl resume`, with stand-ins for the services."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from streamrl.command.attempts import begin_next_attempt
from streamrl.command.fixed_settings import check_changes
from streamrl.command.resolve import chosen_settings, resolve_again, with_addresses, without_chosen
from streamrl.command.settings import Settings
from streamrl.run_folder import RunFolder

SLOW_RUN = {"trainer": {"iteration_s": 0.3}}


def _settings(**sections: Any) -> Settings:
    return Settings(**sections)


def _killed_run(place: Any) -> None:
    """A run whose command was killed while it trained."""
    run = place.start_run("--set", "trainer.num_iterations=1000", stub=SLOW_RUN)
    place.eventually(lambda: (place.run_folder / "run.json").exists() and _runs(place, "generator-1"), timeout_s=60)
    run.send_signal(signal.SIGKILL)
    run.communicate()


def _runs(place: Any, instance: str) -> bool:
    services = json.loads((place.run_folder / "run.json").read_text())["services"]
    return any(service["instance"] == instance for service in services)


def _attempt_of_settings(place: Any) -> int:
    return int(json.loads((place.run_folder / "settings.json").read_text())["run"]["attempt"])


def test_a_killed_run_is_taken_up_as_the_next_attempt(place: Any) -> None:
    _killed_run(place)
    before = json.loads((place.run_folder / "settings.json").read_text())
    done = place.call("resume", "r", "--json", "--set", "trainer.num_iterations=3")
    assert done.exit_code == 0, done.stderr
    assert done.result["status"] == "completed"
    assert "attempt 2" in done.stderr
    after = json.loads((place.run_folder / "settings.json").read_text())
    assert (before["run"]["attempt"], after["run"]["attempt"]) == (1, 2)
    assert after["trainer"]["num_iterations"] == 3
    assert after["kafka"]["bootstrap_servers"] != before["kafka"]["bootstrap_servers"]
    assert json.loads((place.run_folder / "attempt.json").read_text()) == {"attempt": 2}
    assert place.processes() == []


def test_a_completed_run_is_taken_up_only_for_more_iterations(place: Any) -> None:
    assert place.ended(place.start_run()).exit_code == 0
    done = place.call("resume", "--json")
    assert done.exit_code == 2
    assert "run r is completed: it has done its 5 iterations" in done.result["error"]["message"]
    assert "--set trainer.num_iterations=10" in done.result["error"]["message"]
    assert _attempt_of_settings(place) == 1
    # What a resumed run does not need does not keep it from going on.
    (place.run_folder / "summary.json").write_text("[]")
    done = place.call("resume", "--json", "--set", "trainer.num_iterations=7")
    assert done.exit_code == 0, done.stderr
    assert "summary.json is damaged: expected a JSON object, got a list" in done.stderr
    assert _attempt_of_settings(place) == 2


def test_a_run_that_runs_is_not_taken_up(place: Any) -> None:
    run = place.start_run("--set", "trainer.num_iterations=1000", stub=SLOW_RUN)
    place.eventually(lambda: (place.run_folder / "run.json").exists() and _runs(place, "trainer"))
    done = place.call("resume", "r", "--json")
    assert done.exit_code == 2
    assert "run r is run by another command" in done.result["error"]["message"]
    run.send_signal(signal.SIGTERM)
    assert place.ended(run).exit_code == 130


def test_a_process_that_outlives_its_attempt_is_named(place: Any) -> None:
    _killed_run(place)
    place.eventually(lambda: place.processes() == [])
    record = json.loads((place.run_folder / "run.json").read_text())
    sleeper = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000")
    try:
        ticks = int(Path(f"/proc/{sleeper}/stat").read_text().rpartition(")")[2].split()[19])
        record["services"] = [
            {
                "service": "weights",
                "instance": "weights",
                "address": "",
                "process": {"pid": sleeper, "start_ticks": ticks},
            }
        ]
        (place.run_folder / "run.json").write_text(json.dumps(record))
        done = place.call("resume", "r", "--json")
    finally:
        os.kill(sleeper, signal.SIGKILL)
        os.waitpid(sleeper, 0)
    assert done.exit_code == 2
    assert f"processes of run r still live: weights (pid {sleeper})" in done.result["error"]["message"]
    assert _attempt_of_settings(place) == 1


def test_settings_that_a_lineage_is_made_with_are_refused(place: Any) -> None:
    _killed_run(place)
    done = place.call("resume", "r", "--json", "--set", "run.seed=1", "--set", "data.samples_per_prompt=4")
    assert done.exit_code == 2
    message = done.result["error"]["message"]
    assert "run.seed is 0 in this run and cannot become 1" in message
    assert "data.samples_per_prompt is 8 in this run and cannot become 4" in message
    assert _attempt_of_settings(place) == 1


def test_an_attempt_is_on_the_disk_before_its_settings_are(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "r")
    settings = _settings(run={"id": "r", "dir": str(tmp_path)})
    assert folder.last_attempt() == 0
    assert begin_next_attempt(folder, settings).run.attempt == 1
    folder.summary.write_text("{}")
    next_settings = begin_next_attempt(folder, settings)
    assert next_settings.run.attempt == folder.last_attempt() == 2
    assert json.loads(folder.settings.read_text())["run"]["attempt"] == 2
    assert not folder.summary.exists()
    with pytest.raises(ValueError, match=r"run\.seed is 0 in this run and cannot become 1"):
        begin_next_attempt(folder, _settings(run={"id": "r", "dir": str(tmp_path), "seed": 1}))
    assert folder.last_attempt() == 2
    folder.attempt.write_text("{")
    with pytest.raises(ValueError, match=r"attempt\.json is damaged"):
        folder.begin_attempt()


def test_addresses_that_the_command_chose_are_left_to_it_again() -> None:
    asked = _settings(rpc={"weights_address": "0.0.0.0:0", "scheduler_address": "127.0.0.1:4000"})
    final = with_addresses(asked)
    final = final.model_copy(update={"kafka": final.kafka.model_copy(update={"bootstrap_servers": "127.0.0.1:9"})})
    chosen = chosen_settings(asked, final)
    assert chosen == ("rpc.trainer_address", "rpc.weights_address", "kafka.bootstrap_servers")
    again = resolve_again(without_chosen(final.model_dump(mode="json"), chosen), "settings.json", [])
    assert again == asked


@pytest.mark.parametrize(
    "changed", [{"trainer": {"num_iterations": 99, "learning_rate": 1e-3}}, {"generator": {"num_instances": 3}}]
)
def test_what_no_lineage_depends_on_may_change(changed: dict[str, Any]) -> None:
    check_changes(_settings(), _settings(**changed))
