"""One service alone: it must be told what only `streamrl run` could decide."""

import json
from pathlib import Path
from typing import Any

import pytest

from streamrl.command.resolve import resolve
from streamrl.command.serve import check_final

FINAL = (
    "run.id=r",
    "kafka.bootstrap_servers=127.0.0.1:9092",
    "rpc.scheduler_address=127.0.0.1:5001",
    "rpc.weights_address=127.0.0.1:5002",
)
SET_FINAL = [part for item in FINAL for part in ("--set", item)]


@pytest.mark.parametrize("service", ["trainer", "generator", "scheduler", "weights"])
def test_a_service_needs_the_broker_and_the_addresses_of_its_peers(tmp_path: Path, service: str) -> None:
    config = tmp_path / "job.toml"
    config.touch()
    check_final(service, resolve(config, FINAL))
    with pytest.raises(ValueError, match=r"kafka.bootstrap_servers is empty.*rpc.weights_address is 127.0.0.1:0"):
        check_final(service, resolve(config, ["run.id=r"]))


def test_an_address_at_which_nobody_can_be_found_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    config.touch()
    settings = resolve(config, [*FINAL, "rpc.scheduler_address=0.0.0.0:5001"])
    check_final("scheduler", settings)
    with pytest.raises(ValueError, match=r"rpc.scheduler_address is 0\.0\.0\.0:5001, where a service may listen"):
        check_final("generator", settings)


def test_a_served_service_runs_with_its_own_settings_file(place: Any) -> None:
    stub = {"generator-7": {"exit_code": 3}}
    done = place.call("serve", "generator", "job.toml", "--instance", "generator-7", *SET_FINAL, stub=stub)
    assert done.exit_code == 3
    file = place.run_folder / "services" / "generator-7.settings.json"
    assert json.loads(file.read_text())["rpc"]["weights_address"] == "127.0.0.1:5002"


def test_a_service_that_meets_a_newer_attempt_is_started_over_as_a_part_of_it(place: Any) -> None:
    stub = {"generator-0": {"met_attempt": 4, "exit_code": 5}}
    done = place.call("serve", "generator", "job.toml", "--instance", "generator-0", *SET_FINAL, stub=stub)
    assert done.exit_code == 5
    assert [line.split(": ")[0] for line in done.stderr.splitlines()] == [
        "generator-0 of run r, attempt 1",
        "generator-0 of run r, attempt 4",
    ]


def test_each_start_of_the_trainer_is_the_next_attempt_until_the_run_is_completed(place: Any) -> None:
    dies = {"trainer": {"exit_code": 1, "error": "no more"}}
    for attempt in (1, 2):
        done = place.call("serve", "trainer", "job.toml", *SET_FINAL, stub=dies)
        assert done.exit_code == 1
        assert json.loads((place.run_folder / "settings.json").read_text())["run"]["attempt"] == attempt
    assert place.call("serve", "trainer", "job.toml", *SET_FINAL).exit_code == 0
    done = place.call("serve", "trainer", "job.toml", *SET_FINAL, stub=dies)
    assert done.exit_code == 0 and "is completed: it has done its 5 iterations" in done.stderr
    assert json.loads((place.run_folder / "attempt.json").read_text())["attempt"] == 3


def test_a_trainer_that_dies_when_the_run_is_completed_has_not_failed(place: Any) -> None:
    dies = {"trainer": {"exit_code": 1, "dies_completed": True}}
    assert place.call("serve", "trainer", "job.toml", *SET_FINAL, stub=dies).exit_code == 0


def test_a_trainer_whose_folder_cannot_be_locked_is_refused_in_one_sentence(place: Any) -> None:
    (place.run_folder / "lock").mkdir(parents=True)
    done = place.call("serve", "trainer", "job.toml", *SET_FINAL)
    assert done.exit_code == 2
    assert done.stderr == (
        f"error: run.dir is {place.run_folder.parent}, where no run can be: "
        f"Is a directory: {place.run_folder / 'lock'}\n"
    )


@pytest.mark.parametrize("place_of_rank", [{"NODE_RANK": "1"}, {"RANK": "8", "NODE_RANK": "0"}])
def test_another_rank_of_the_trainer_begins_no_attempt_and_not_again_what_is_completed(
    place: Any, place_of_rank: dict[str, str]
) -> None:
    command = ("serve", "trainer", "job.toml", "--instance", "trainer-1", *SET_FINAL)
    done = place.call(*command, stub={"trainer-1": {"exit_code": 3}}, **place_of_rank)
    assert done.exit_code == 3
    assert not (place.run_folder / "attempt.json").exists()
    assert place.call("serve", "trainer", "job.toml", *SET_FINAL).exit_code == 0
    done = place.call(*command, stub={"trainer-1": {"exit_code": 3}}, **place_of_rank)
    assert done.exit_code == 0 and "is completed" in done.stderr


def test_a_served_service_ends_when_it_is_told_to(place: Any) -> None:
    process = place.start("serve", "weights", "job.toml", *SET_FINAL)
    place.eventually((place.run_folder / "services" / "weights.settings.json").is_file)
    place.eventually(lambda: len(place.processes()) == 2)
    process.terminate()
    assert place.ended(process).exit_code in (0, 143)
    assert place.processes() == []


def test_generators_need_names(place: Any) -> None:
    done = place.call("serve", "generator", "job.toml", *SET_FINAL)
    assert done.exit_code == 2
    assert "--instance generator-0" in done.stderr
