"""What is looked at before a run starts."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from streamrl.command import checks
from streamrl.command.certs import make_trust
from streamrl.command.memory_needs import MemoryNeeds
from streamrl.command.ports import free_port
from streamrl.command.settings import Settings
from streamrl.errors import BrokerUnavailableError, StreamRLError
from trainer_svc.memory_plan import RankMemory


def _settings(**sections: object) -> Settings:
    return Settings(**sections)  # type: ignore[arg-type]


def test_free_addresses_pass() -> None:
    checks.check_addresses(_settings())
    checks.check_addresses(_settings(rpc={"weights_address": f"127.0.0.1:{free_port()}"}))


def test_two_services_cannot_have_one_address() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ValueError, match=f"{address} is given to two services"):
        checks.check_addresses(_settings(rpc={"weights_address": address, "trainer_address": address}))


def test_two_generators_of_one_machine_cannot_have_one_address() -> None:
    rpc = {"generator_address": f"127.0.0.1:{free_port()}"}
    checks.check_addresses(_settings(rpc=rpc))
    with pytest.raises(ValueError, match="cannot listen on one port"):
        checks.check_addresses(_settings(rpc=rpc, generator={"num_instances": 2}))


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rpc.trainer_address is 192\.0\.2\.1:0: host 192\.0\.2\.1 is not an address"):
        checks.check_addresses(_settings(rpc={"trainer_address": "192.0.2.1:0"}))


def test_a_run_whose_weights_svc_would_be_a_relay_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weights.upstream is 127\.0\.0\.1:9: leave it out"):
        checks.check_addresses(_settings(weights={"upstream": "127.0.0.1:9"}))


def test_every_role_of_a_run_must_be_able_to_show_who_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_trust(tmp_path / "certs", days=1)
    monkeypatch.chdir(tmp_path)
    settings = _settings(rpc={"trust": "certs"})
    monkeypatch.chdir("/")
    checks.check_trust(settings)
    (tmp_path / "certs" / "command.token").unlink()
    with pytest.raises(ValueError, match=r"rpc.trust: cannot read .*command.token"):
        checks.check_trust(settings)


def test_a_broker_that_does_not_answer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "BROKER_TIMEOUT_S", 0.5)
    checks.check_broker(_settings())
    with pytest.raises(BrokerUnavailableError, match=r"127\.0\.0\.1:9"):
        checks.check_broker(_settings(kafka={"bootstrap_servers": "127.0.0.1:9"}))


def test_a_run_that_needs_more_memory_than_there_is_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = RankMemory(16 * 10**12, 0, 0, 0, 0, 0, resting=0, offloaded=0, peak=16 * 10**12)
    too_much = MemoryNeeds(10**12, rank, trainer=16 * 10**12, generators=10**12, trainer_host=0)
    monkeypatch.setattr(checks, "memory_needs", lambda _settings: too_much)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ValueError, match=r"the run needs about 15832\.5 GiB"):
        checks.check_memory(_settings())
    # With a GPU most of it is not in this memory, but in its own.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(checks, "smallest_gpu_bytes", lambda _gpus: 80 * 1024**3)
    with pytest.raises(ValueError, match=r"each trainer rank needs about 14901\.2 GiB .*, which has 80\.0 GiB: take"):
        checks.check_memory(_settings())
    assert checks.check_memory(_settings(trainer={"device_memory_gib": 20_000})) == too_much
    # Where nothing is known of it, nothing is compared.
    monkeypatch.setattr(checks, "smallest_gpu_bytes", lambda _gpus: None)
    assert checks.check_memory(_settings()) == too_much


def test_what_stays_beside_an_engine_or_goes_to_the_host_must_have_room_there(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 1024**3
    rank = RankMemory(20 * gib, 0, 0, 0, 0, 0, resting=20 * gib, offloaded=0, peak=40 * gib)
    needs = MemoryNeeds(10**9, rank, trainer=0, generators=0, trainer_host=gib)
    monkeypatch.setattr(checks, "memory_needs", lambda _settings: needs)
    monkeypatch.setattr(checks, "smallest_gpu_bytes", lambda _gpus: 80 * gib)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert checks.check_memory(_settings(pipeline={"mode": "sync"})) == needs
    with pytest.raises(ValueError, match=r"keeps about 20\.0 GiB .* generates with 90% of its 80\.0 GiB"):
        checks.check_memory(_settings(pipeline={"mode": "colocated"}))
    roomy = {"pipeline": {"mode": "colocated"}, "generator": {"gpu_memory_utilization": 0.7}}
    assert checks.check_memory(_settings(**roomy)) == needs
    needs = dataclasses.replace(needs, trainer_host=10**15)
    with pytest.raises(ValueError, match=r"need about 931322\.6 GiB of this machine's memory for what trainer.offload"):
        checks.check_memory(_settings(pipeline={"mode": "sync"}))


def _spawned(place: Any, **stub: Any) -> list[str]:
    """What is said while the services check."""
    said: list[str] = []
    environment = {"STUB": json.dumps(stub), "PYTHONPATH": f"{place.folder}:{Path.cwd()}"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place.folder)
        for name, value in environment.items():
            patch.setenv(name, value)
        checks.check_services(_settings(), said.append)
    return said


def test_a_check_that_leaves_a_thread_running_ends(place: Any) -> None:
    assert _spawned(place, trainer={"check_thread": True}) == []


def test_what_the_scheduler_finds_is_told_too(place: Any) -> None:
    with pytest.raises(ValueError, match="there is no file"):
        _spawned(place, scheduler={"check_error": "there is no file"})


def test_a_check_that_lasts_is_told_and_given_up_by_name(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_SERVICE_WORD_S", 0.05)
    said = _spawned(place, trainer={"check_s": 0.5})
    assert said and said[-1].startswith("still checking after ") and "trainer_svc" in said[-1]
    monkeypatch.setattr(checks, "_SERVICE_TIMEOUT_S", 3.0)
    with pytest.raises(StreamRLError, match=r"the check of trainer_svc still ran after 3 s and was given up \(it has"):
        _spawned(place, trainer={"check_s": 1000})
