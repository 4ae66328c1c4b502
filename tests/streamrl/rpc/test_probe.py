import asyncio

from streamrl.command.ports import free_port
from streamrl.rpc import probe
from streamrl.rpc.server import Server


async def test_a_service_that_listens_serves_and_one_that_ended_does_not(capsys):
    server = Server("grpc.health.v1.Health", lambda _server: None)
    address = await server.serve("127.0.0.1:0")
    assert await asyncio.to_thread(probe.main, [address]) == 0
    await server.stop()
    assert await asyncio.to_thread(probe.main, [address]) == 1
    assert f"{address} does not answer" in capsys.readouterr().err


def test_a_port_where_nobody_listens_does_not_serve(capsys):
    assert probe.main([f"127.0.0.1:{free_port('127.0.0.1', set())}"]) == 1
    assert "UNAVAILABLE" in capsys.readouterr().err
