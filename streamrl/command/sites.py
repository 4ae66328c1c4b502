"""The settings as a service that stands at one site has them."""

from typing import Any

from streamrl.command.settings import Settings
from streamrl.command.site_settings import SiteSection

TRAINING_SERVICES = ("trainer", "scheduler")
"""Those that stand at the training site alone; weights_svc may have relays at others."""


def at_site(settings: Settings, name: str, service: str | None = None) -> Settings:
    """Broker and peers as they are found from this site.

    Args:
        service: keeps its own address in section `rpc`, which is the one that it listens on; None: no service at all.

    Raises:
        ValueError: there is no such site, or the service does not stand there.
    """
    site = settings.sites.get(name)
    if site is None:
        known = ", ".join(settings.sites) or "none"
        raise ValueError(f"no site {name!r} in these settings: section sites has {known}")
    if service in TRAINING_SERVICES and site.role != "training":
        raise ValueError(
            f"{service} stands at the training site, and {name} is a generation site: choose another --site, or set "
            f'sites.{name}.role = "training"'
        )
    if service == "weights" and site.role != "training":
        return _relay(settings, name, site)
    peers = {"scheduler": site.scheduler, "weights": site.weights}
    addresses = {f"{peer}_address": address for peer, address in peers.items() if address and peer != service}
    return settings.model_copy(
        update={
            "run": settings.run.model_copy(update={"site": name}),
            "kafka": settings.kafka.model_copy(update=_kafka_changes(settings, site)),
            "rpc": settings.rpc.model_copy(update=addresses),
        }
    )


def _relay(settings: Settings, name: str, site: SiteSection) -> Settings:
    """weights_svc of a generation site, which takes its versions from another."""
    listens_at = site.relay or site.weights
    if listens_at is None:
        raise ValueError(
            f"{name} is a generation site, where weights_svc is a relay: sites.{name}.weights has to say where"
        )
    upstream = _upstream(settings, site)
    if upstream in (listens_at, site.weights):
        raise ValueError(
            f"a relay at {name} would take its versions from {upstream}, where it is found itself: give it another "
            f"address in sites.{name}.weights, or another upstream in sites.{name}.upstream"
        )
    _check_that_it_ends(settings, name)
    return settings.model_copy(
        update={
            "run": settings.run.model_copy(update={"site": name}),
            "kafka": settings.kafka.model_copy(update=_kafka_changes(settings, site)),
            "rpc": settings.rpc.model_copy(update={"weights_address": listens_at}),
            "weights": settings.weights.model_copy(update={"upstream": upstream, "found_at": site.weights}),
        }
    )


def _upstream(settings: Settings, site: SiteSection) -> str:
    """Where a relay at a site takes its versions from."""
    training = next((other for other in settings.sites.values() if other.role == "training"), None)
    return site.upstream or (training.weights if training else None) or settings.rpc.weights_address


def _check_that_it_ends(settings: Settings, name: str) -> None:
    """Raises ValueError when a site's relay would, by way of others, wait for itself."""
    relays = {
        address: other
        for other, site in settings.sites.items()
        if site.role != "training" and _upstream(settings, site) not in (found := (site.weights, site.relay))
        for address in found
    }
    path = [name]
    while (above := relays.get(_upstream(settings, settings.sites[path[-1]]))) is not None:
        if above in path:
            raise ValueError(
                f"relays would take their versions from each other ({' from '.join([*path, above])}): give one of "
                "them the training site as its upstream (sites.NAME.upstream)"
            )
        path.append(above)


def keeps_prompts(settings: Settings) -> bool:
    """Whether topic `prompts` exists at the site of these settings: it stays where the training is."""
    site = settings.sites.get(settings.run.site)
    return site is None or site.role == "training"


def _kafka_changes(settings: Settings, site: SiteSection) -> dict[str, Any]:
    if site.kafka is None:
        return {}
    return {
        "bootstrap_servers": site.kafka.bootstrap_servers,
        "client": settings.kafka.client | site.kafka.client,
        "replication_factor": site.kafka.replication_factor or settings.kafka.replication_factor,
    }
