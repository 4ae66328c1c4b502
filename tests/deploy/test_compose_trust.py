"""deploy/compose.trust.yaml: over compose.yaml, every service has the identity of its role and is asked with it."""

from pathlib import Path

import pytest
import yaml

from streamrl.command.main import run_command
from streamrl.command.resolve import resolve
from streamrl.rpc.trust import Identity
from tests.deploy.schemas import ROOT
from tests.deploy.test_compose import OURS, SECRETS, SERVICES, filled, target

TRUSTED = yaml.safe_load((ROOT / "deploy" / "compose.trust.yaml").read_text())["services"]


def test_every_service_of_ours_is_there_and_nothing_else():
    assert sorted(TRUSTED) == sorted(OURS)


@pytest.mark.parametrize("name", OURS)
def test_a_service_has_the_files_of_its_role_and_is_asked_with_them(name, monkeypatch):
    service, role = TRUSTED[name], target(SERVICES[name])
    for variable, text in (SERVICES[name]["environment"] | service["environment"]).items():
        monkeypatch.setenv(variable, filled(text, SECRETS))
    monkeypatch.chdir(ROOT)
    trust = resolve(ROOT / SERVICES[name]["command"][0], [], must_have_id=True).rpc.trust
    (volume,) = service["volumes"]
    assert filled(volume, {"TRUST": "/made"}) == f"/made/{role}:{trust}:ro"
    plain = SERVICES[name]["healthcheck"]["test"]
    assert service["healthcheck"]["test"] == [*plain, "--trust", str(trust), "--role", role]


@pytest.mark.parametrize("role", sorted({target(SERVICES[name]) for name in OURS}))
def test_what_the_readme_copies_is_all_that_a_role_needs(role, tmp_path: Path):
    assert run_command(["certs", str(tmp_path / "certs")]) == 0
    (copied,) = [
        line.split()[1:-1] for line in (ROOT / "deploy" / "README.md").read_text().splitlines() if "  cp certs/" in line
    ]
    own = tmp_path / "own"
    own.mkdir()
    for name in (name.replace("$role", role) for name in copied):
        (own / Path(name).name).write_bytes((tmp_path / name).read_bytes())
    assert Identity.load(own, role).role == role
