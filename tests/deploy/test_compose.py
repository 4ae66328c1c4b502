"""deploy/compose.yaml: its form, its secrets, and that every part finds the others."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from streamrl import __version__
from streamrl.command.resolve import resolve
from streamrl.command.serve import check_final
from streamrl.command.settings import SERVICE_SETTINGS, Settings
from tests.deploy.dockerfile import configuration, read_stages
from tests.deploy.schemas import ROOT, schema_file, skip_or_fail

FILE = ROOT / "deploy" / "compose.yaml"
SECRETS = {"KAFKA_PASSWORD": "of-kafka", "DATABASE_PASSWORD": "of-the-database"}
COMPOSE: dict[str, Any] = yaml.safe_load(FILE.read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
STAGES = read_stages((ROOT / "deploy" / "Dockerfile").read_text())
PROFILES = ("cpu", "gpu")
OURS = [name for name, service in SERVICES.items() if service.get("profiles")]


def filled(text: str, variables: Mapping[str, str]) -> str:
    """A value with the variables in it as Compose fills them in: ${NAME:-default} and ${NAME:?message}."""

    def value(found: re.Match[str]) -> str:
        name, operator, rest = found.groups()
        return variables[name] if operator == ":?" else variables.get(name, rest)

    return re.sub(r"\$\{(\w+)(:[-?])([^}]*)\}", value, text)


def of_profile(profile: str) -> dict[str, dict[str, Any]]:
    return {name: service for name, service in SERVICES.items() if profile in service.get("profiles", [profile])}


def target(service: Mapping[str, Any]) -> str:
    return str(service["build"]["target"])


@pytest.mark.parametrize("name", OURS)
def test_a_service_starts_from_settings_that_it_understands(name, monkeypatch):
    service = SERVICES[name]
    for variable, text in service["environment"].items():
        monkeypatch.setenv(variable, filled(text, SECRETS))
    config, *options = service["command"]
    # The settings file is mounted where the image's working folder is.
    assert f"../{Path(config).parent}:/experiment/{Path(config).parent}:ro" in service["volumes"]
    monkeypatch.chdir(ROOT)

    settings = resolve(ROOT / config, [], must_have_id=True)

    check_final(target(service), settings)
    SERVICE_SETTINGS[target(service)].model_validate_json(settings.model_dump_json())
    assert settings.kafka.client["sasl.password"] == "of-kafka"
    assert options == (["--instance", name.removeprefix("gpu-")] if target(service) == "generator" else [])


def settings_of(profile: str, monkeypatch: pytest.MonkeyPatch) -> Settings:
    (trainer,) = [service for service in of_profile(profile).values() if _is(service, "trainer")]
    for variable, text in trainer["environment"].items():
        monkeypatch.setenv(variable, filled(text, SECRETS))
    monkeypatch.chdir(ROOT)
    return resolve(ROOT / trainer["command"][0], [], must_have_id=True)


def _is(service: Mapping[str, Any], name: str) -> bool:
    return "build" in service and target(service) == name


@pytest.mark.parametrize("profile", PROFILES)
def test_the_services_of_a_profile_find_each_other(profile, monkeypatch):
    services = of_profile(profile)
    settings = settings_of(profile, monkeypatch)
    assert len({service["command"][0] for name, service in services.items() if name in OURS}) == 1
    assert len({json.dumps(service["environment"]) for name, service in services.items() if name in OURS}) == 1
    names = set(services) | {
        alias
        for service in services.values()
        if isinstance(service["networks"], dict)
        for network in service["networks"].values()
        for alias in network.get("aliases", [])
    }
    for address in (
        settings.rpc.scheduler_address,
        settings.rpc.weights_address,
        settings.kafka.bootstrap_servers,
        settings.mlflow.tracking_uri.removeprefix("http://"),
    ):
        assert address.partition(":")[0] in names
    assert sum(_is(service, "generator") for service in services.values()) == settings.generator.num_instances
    # All are in the network where Kafka and the tracker are.
    for name, service in services.items():
        assert "data" in service["networks"], name


@pytest.mark.parametrize("name", OURS)
def test_a_service_is_asked_for_its_health_where_it_listens(name, monkeypatch):
    service = SERVICES[name]
    settings = settings_of(service["profiles"][0], monkeypatch)
    listens = getattr(settings.rpc, f"{target(service)}_address")
    command, asked = service["healthcheck"]["test"][:-1], service["healthcheck"]["test"][-1]
    assert command == ["CMD", "python", "-m", "streamrl.rpc.probe"]
    assert asked == listens.replace("0.0.0.0", "127.0.0.1")
    assert {int(asked.rpartition(":")[2])} == configuration(STAGES, target(service)).ports


def test_gpus_are_as_many_as_the_settings_ask_for_and_each_is_given_once(monkeypatch):
    settings = settings_of("gpu", monkeypatch)
    given: list[str] = []
    for service in of_profile("gpu").values():
        if not _is(service, "trainer") and not _is(service, "generator"):
            continue
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        wide = settings.trainer.num_ranks if _is(service, "trainer") else settings.generator.tensor_parallel_size
        assert len(device["device_ids"]) == wide
        given += device["device_ids"]
    assert len(set(given)) == len(given)


def test_images_are_pinned_and_built_from_targets_that_exist():
    for name, service in SERVICES.items():
        image, _, tag = service["image"].partition(":")
        assert re.match(r"\d+\.\d+", tag), f"{name}: {image} has no version"
        if "build" not in service:
            continue
        build = service["build"]
        assert (FILE.parent / build["context"] / build["dockerfile"]).samefile(ROOT / "deploy" / "Dockerfile")
        assert image == f"streamrl/{build['target']}"
        assert build["target"] in STAGES
        device = build.get("args", {}).get("DEVICE")
        assert tag == (f"{__version__}-{'cuda' if 'gpu' in name else 'cpu'}" if device else __version__)
        assert device in (None, "cuda" if "gpu" in name else "cpu")


def test_nothing_runs_as_root_or_may_become_it():
    for name, service in SERVICES.items():
        user = service.get("user") or configuration(STAGES, target(service)).user
        assert user.partition(":")[0] not in ("", "0", "root"), name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name


def test_passwords_have_no_default_and_only_the_tracker_can_be_reached_from_this_machine_alone():
    text = FILE.read_text()
    for secret in SECRETS:
        assert re.findall(rf"\$\{{{secret}(..)", text) and set(re.findall(rf"\$\{{{secret}(..)", text)) == {":?"}
    assert {name: service["ports"] for name, service in SERVICES.items() if "ports" in service} == {
        "tracker": ["127.0.0.1:5000:5000"]
    }


def test_every_volume_network_and_dependency_is_there_and_used():
    used_volumes, used_networks = set(), set()
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (FILE.parent / source).exists(), source
            else:
                used_volumes.add(source)
        used_networks |= set(service["networks"])
        for other, wish in service.get("depends_on", {}).items():
            assert wish == {"condition": "service_healthy"}
            assert "healthcheck" in SERVICES[other]
    assert used_volumes == set(COMPOSE["volumes"])
    assert used_networks == set(COMPOSE["networks"])


def test_the_file_is_valid_by_the_compose_specification():
    schema = json.loads(schema_file("compose-spec.json").read_text())
    problems = [
        f"{error.json_path}: {error.message}" for error in jsonschema.Draft7Validator(schema).iter_errors(COMPOSE)
    ]
    assert problems == []


def _docker_compose(folder: Path, variables: Mapping[str, str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    if shutil.which("docker-compose") is None:
        skip_or_fail("docker-compose is not installed")
    (folder / ".env").write_text("".join(f"{name}={value}\n" for name, value in variables.items()))
    return subprocess.run(
        ["docker-compose", "--env-file", str(folder / ".env"), "--file", str(FILE), *arguments],
        env={name: value for name, value in os.environ.items() if name not in SECRETS},
        capture_output=True,
        text=True,
        check=False,
    )


def test_docker_compose_reads_it(tmp_path):
    done = _docker_compose(tmp_path, SECRETS, "--profile", "cpu", "--profile", "gpu", "config")
    assert done.returncode == 0, done.stderr
    assert set(yaml.safe_load(done.stdout)["services"]) == set(SERVICES)


@pytest.mark.parametrize("secret", SECRETS)
def test_docker_compose_says_which_password_is_missing_and_what_makes_it(secret, tmp_path):
    others = {name: value for name, value in SECRETS.items() if name != secret}
    done = _docker_compose(tmp_path, others, "--profile", "cpu", "config")
    assert done.returncode != 0
    assert f"run deploy/make_secrets.sh, or set {secret}" in done.stderr


def test_secrets_are_made_once_and_for_their_owner_alone(tmp_path):
    script = shutil.copy(ROOT / "deploy" / "make_secrets.sh", tmp_path)
    subprocess.run([script], check=True, capture_output=True)
    file = tmp_path / ".env"
    made = file.read_text()
    values = dict(line.split("=") for line in made.splitlines())
    assert set(values) == set(SECRETS)
    assert all(re.fullmatch("[0-9a-f]{48}", value) for value in values.values())
    assert len(set(values.values())) == len(values)
    assert file.stat().st_mode & 0o777 == 0o600
    subprocess.run([script], check=True, capture_output=True)
    assert file.read_text() == made
