"""What a service takes from its site."""

from pathlib import Path

import pytest

from streamrl.command.resolve import resolve
from streamrl.command.settings import Settings
from streamrl.command.settings_text import public_settings, toml_text
from streamrl.command.sites import at_site, keeps_prompts

TWO_SITES = """
[run]
id = "r"
[kafka]
replication_factor = 3
retention_hours = 12.0
client = { "security.protocol" = "SASL_SSL", "sasl.username" = "streamrl" }
[rpc]
scheduler_address = "0.0.0.0:7001"
weights_address = "0.0.0.0:7002"
[sites.home]
role = "training"
kafka = { bootstrap_servers = "kafka.home:9092" }
scheduler = "scheduler:7001"
weights = "weights:7002"
[sites.west]
kafka = { bootstrap_servers = "kafka.west:9092", client = { "sasl.username" = "west", "sasl.password" = "secret" } }
scheduler = "home.example.com:7001"
weights = "home.example.com:7002"
"""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "job.toml").write_text(TWO_SITES)
    return resolve(tmp_path / "job.toml", ["sites.west.kafka.replication_factor=1"])


def test_a_generator_finds_the_broker_of_its_own_site_and_the_peers_of_the_other(settings: Settings) -> None:
    west = at_site(settings, "west", "generator")
    assert west.run.site == "west"
    assert west.kafka.bootstrap_servers == "kafka.west:9092"
    assert (west.kafka.replication_factor, west.kafka.retention_hours) == (1, 12.0)
    assert west.rpc.scheduler_address == "home.example.com:7001"
    assert west.rpc.weights_address == "home.example.com:7002"


def test_librdkafkas_settings_of_a_site_come_over_the_common_ones(settings: Settings) -> None:
    assert at_site(settings, "home").kafka.client == settings.kafka.client
    assert at_site(settings, "west").kafka.client == {
        "security.protocol": "SASL_SSL",
        "sasl.username": "west",
        "sasl.password": "secret",
    }


def test_a_service_listens_where_section_rpc_says_and_finds_others_where_its_site_does(settings: Settings) -> None:
    scheduler = at_site(settings, "home", "scheduler").rpc
    assert (scheduler.scheduler_address, scheduler.weights_address) == ("0.0.0.0:7001", "weights:7002")
    trainer = at_site(settings, "home", "trainer").rpc
    assert (trainer.scheduler_address, trainer.weights_address) == ("scheduler:7001", "weights:7002")


def test_prompts_stay_at_the_training_site(settings: Settings) -> None:
    assert keeps_prompts(settings) and keeps_prompts(at_site(settings, "home"))
    assert not keeps_prompts(at_site(settings, "west"))


@pytest.mark.parametrize("service", ["trainer", "scheduler"])
def test_a_generation_site_has_no_trainer_and_no_scheduler(settings: Settings, service: str) -> None:
    with pytest.raises(ValueError, match=rf"{service} stands at the training site.*sites.west.role"):
        at_site(settings, "west", service)


def test_weights_svc_of_a_generation_site_is_a_relay_of_the_training_sites(settings: Settings) -> None:
    west = settings.sites["west"].model_copy(update={"weights": "relay.west:7003"})
    there = settings.model_copy(update={"sites": settings.sites | {"west": west}})
    relay = at_site(there, "west", "weights")
    assert (relay.rpc.weights_address, relay.weights.upstream) == ("relay.west:7003", "weights:7002")
    assert at_site(there, "west", "generator").rpc.weights_address == "relay.west:7003"
    assert at_site(there, "home", "weights").weights.upstream is None


def test_a_relay_may_listen_elsewhere_than_it_is_found_and_have_another_relay_above_it(settings: Settings) -> None:
    west = settings.sites["west"].model_copy(
        update={"weights": "relay.west:7003", "relay": "0.0.0.0:7003", "upstream": "relay.east:7003"}
    )
    relay = at_site(settings.model_copy(update={"sites": settings.sites | {"west": west}}), "west", "weights")
    assert (relay.rpc.weights_address, relay.weights.found_at) == ("0.0.0.0:7003", "relay.west:7003")
    assert relay.weights.upstream == "relay.east:7003"


@pytest.mark.parametrize("weights, message", [(None, "has to say where"), ("weights:7002", "found itself")])
def test_a_relay_without_an_address_of_its_own_is_refused(settings: Settings, weights: str, message: str) -> None:
    west = settings.sites["west"].model_copy(update={"weights": weights})
    with pytest.raises(ValueError, match=message):
        at_site(settings.model_copy(update={"sites": settings.sites | {"west": west}}), "west", "weights")


def test_relays_that_would_wait_for_each_other_are_refused(settings: Settings) -> None:
    site = settings.sites["west"]
    ring = {
        name: site.model_copy(update={"weights": f"relay.{name}:7003", "upstream": f"relay.{above}:7003"})
        for name, above in (("west", "east"), ("east", "north"), ("north", "west"))
    }
    with pytest.raises(ValueError, match=r"\(west from east from north from west\): give one of them the training"):
        at_site(settings.model_copy(update={"sites": settings.sites | ring}), "west", "weights")
    ring["north"] = ring["north"].model_copy(update={"upstream": None})
    chain = settings.model_copy(update={"sites": settings.sites | ring})
    assert at_site(chain, "west", "weights").weights.upstream == "relay.east:7003"


def test_an_unknown_site_is_answered_with_those_that_there_are(settings: Settings) -> None:
    with pytest.raises(ValueError, match=r"no site 'east'.*has home, west"):
        at_site(settings, "east")


def test_two_training_sites_are_refused(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(TWO_SITES)
    with pytest.raises(ValueError, match="sites home and west have the role of training"):
        resolve(tmp_path / "job.toml", ["sites.west.role=training"])


def test_secrets_of_a_site_come_from_the_environment_and_are_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.toml").write_text(TWO_SITES)
    monkeypatch.setenv("STREAMRL_SITES__HOME__KAFKA__CLIENT__SASL__PASSWORD", "hunter2")
    settings = resolve(tmp_path / "job.toml", [])
    assert at_site(settings, "home").kafka.client["sasl.password"] == "hunter2"
    shown = toml_text(public_settings(settings))
    assert "hunter2" not in shown and "secret" not in shown


def test_what_is_shown_of_sites_can_be_read_again(settings: Settings, tmp_path: Path) -> None:
    shown = tmp_path / "shown.toml"
    shown.write_text(toml_text(public_settings(settings)))
    assert resolve(shown, []).sites.keys() == settings.sites.keys()
