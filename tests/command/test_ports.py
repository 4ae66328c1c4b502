"""Free ports and taken ones."""

import socket

import pytest

from streamrl.command.ports import free_port, why_not_listen


def test_a_free_port_can_be_listened_on_and_then_is_taken() -> None:
    port = free_port()
    assert why_not_listen(f"127.0.0.1:{port}") is None
    with socket.create_server(("127.0.0.1", port)):
        assert why_not_listen(f"127.0.0.1:{port}") == f"port {port} is in use by another process"
        assert free_port() != port


def test_a_host_of_another_machine_is_refused() -> None:
    assert "not an address of this machine" in (why_not_listen("192.0.2.1:0") or "")
    with pytest.raises(OSError):
        free_port("192.0.2.1")
