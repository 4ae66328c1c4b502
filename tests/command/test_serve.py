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


@pytest.mark.parametrize("service", ["trainer", "generator", "scheduler", "weights"])
def test_a_service_needs_the_broker_and_the_addresses_of_its_peers(tmp_path: Path, service: str) -> None:
    config = tmp_path / "job.toml"
    config.touch()
    check_final(service, resolve(config, FINAL))
    with pytest.raises(ValueError, match=r"kafka.bootstrap_servers is empty.*rpc.weights_address is 127.0.0.1:0"):
        check_final(service, resolve(config, ["run.id=r"]))


def test_a_served_service_runs_with_its_own_settings_file(place: Any) -> None:
    arguments = [part for item in FINAL for part in ("--set", item)]
    stub = {"generator-7": {"exit_code": 3}}
    done = place.call("serve", "generator", "job.toml", "--instance", "generator-7", *arguments, stub=stub)
    assert done.exit_code == 3
    file = place.run_folder / "services" / "generator-7.settings.json"
    assert json.loads(file.read_text())["rpc"]["weights_address"] == "127.0.0.1:5002"


def test_generators_need_names(place: Any) -> None:
    arguments = [part for item in FINAL for part in ("--set", item)]
    done = place.call("serve", "generator", "job.toml", *arguments)
    assert done.exit_code == 2
    assert "--instance generator-0" in done.stderr
