"""`streamrl certs`: files that fit together, kept from others, and never written over."""

import json
import stat

import pytest

from streamrl.command.main import run_command
from streamrl.digest import bytes_digest
from streamrl.rpc.trust import ROLES, Identity


def test_each_role_gets_what_it_needs(tmp_path, capsys):
    assert run_command(["certs", str(tmp_path / "certs"), "--json", "--days", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["roles"] == list(ROLES)
    for role in ROLES:
        identity = Identity.load(tmp_path / "certs", role)
        assert identity.roles_by_token_digest[bytes_digest(identity.token.encode())] == role


def test_keys_and_tokens_are_for_their_owner_alone(tmp_path):
    run_command(["certs", str(tmp_path / "certs")])
    secret = [path for path in (tmp_path / "certs").iterdir() if path.suffix in (".key", ".token")]
    assert len(secret) == 2 * len(ROLES) + 1
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in secret)


def test_certificates_are_not_written_over(tmp_path, capsys):
    run_command(["certs", str(tmp_path)])
    before = (tmp_path / "ca.pem").read_bytes()
    assert run_command(["certs", str(tmp_path)]) == 2
    assert "has certificates already" in capsys.readouterr().err
    assert (tmp_path / "ca.pem").read_bytes() == before


@pytest.mark.parametrize("days", ["0", "-1", "many"])
def test_certificates_that_were_never_valid_are_refused(tmp_path, days):
    assert run_command(["certs", str(tmp_path / "certs"), "--days", days]) == 2
