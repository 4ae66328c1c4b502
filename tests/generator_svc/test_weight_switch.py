"""What a switch does when the canaries of what was loaded are off."""

import asyncio

import pytest

from generator_svc.engine import SwitchReport
from generator_svc.version_gate import Target
from generator_svc.weight_switch import WeightSwitch
from streamrl.v1.weights_pb2 import AcknowledgeRequest, Canary, NegotiateResponse, VersionManifest


class Engine:
    """As much of an engine as a switch needs: it may load a version wrongly."""

    def __init__(self, loads_wrongly: int) -> None:
        self.loads_wrongly = loads_wrongly
        self.num_loads = 0
        self.anew: list[bool] = []
        self._forgotten = False

    def forget_fetched(self) -> None:
        self._forgotten = True

    async def switch(self, manifest: VersionManifest) -> SwitchReport:
        self.num_loads += 1
        self.anew.append(self._forgotten)
        self._forgotten = False
        return SwitchReport(manifest.weight_version, manifest.digest, fetch_s=0.1, switch_s=0.1)

    async def score(self, token_ids: list[int]) -> list[float]:
        return [-9.0 if self.num_loads <= self.loads_wrongly else -1.0]


class Weights:
    """As much of weights_svc as a switch needs."""

    def __init__(self) -> None:
        self.acknowledged: list[AcknowledgeRequest] = []

    async def negotiate(self, *, at_least: int = 0, exactly: int | None = None) -> NegotiateResponse:
        canary = Canary(token_ids=[1, 2], logprobs=[-1.0])
        return NegotiateResponse(manifest=VersionManifest(weight_version=at_least, digest="d", canaries=[canary]))

    async def acknowledge(self, outcome: AcknowledgeRequest) -> None:
        self.acknowledged.append(outcome)


async def switched(engine: Engine, num_versions: int) -> Weights:
    weights = Weights()
    switch = WeightSwitch(engine, weights, alarm_nats=0.01, patience_s=5.0)  # type: ignore[arg-type]
    for version in range(num_versions):
        await switch.switch(Target(version, exact=False))
        await asyncio.sleep(0)  # acknowledged beside it
    await switch.close()
    return weights


async def test_a_version_whose_canaries_are_off_is_fetched_anew_and_loaded_again(caplog: pytest.LogCaptureFixture):
    engine = Engine(loads_wrongly=1)
    weights = await switched(engine, 2)
    assert engine.anew == [False, True, False]
    assert [one.canary_abs_diff_mean for one in weights.acknowledged] == [0.0, 0.0]
    assert "version=0 is fetched anew" in caplog.text


async def test_what_did_not_help_is_not_done_at_every_switch():
    """Where generator and trainer compute differently, each version would be fetched twice."""
    engine = Engine(loads_wrongly=100)
    weights = await switched(engine, 3)
    assert engine.anew == [False, True, False, False]
    assert [one.canary_abs_diff_mean for one in weights.acknowledged] == [8.0, 8.0, 8.0]
