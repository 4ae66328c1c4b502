"""The settings as a service that stands at one site has them."""

from typing import Any

from streamrl.command.settings import Settings
from streamrl.command.site_settings import SiteSection

TRAINING_SERVICES = ("trainer", "scheduler", "weights")
"""Those that stand at the training site."""


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
    peers = {"scheduler": site.scheduler, "weights": site.weights}
    addresses = {f"{peer}_address": address for peer, address in peers.items() if address and peer != service}
    return settings.model_copy(
        update={
            "run": settings.run.model_copy(update={"site": name}),
            "kafka": settings.kafka.model_copy(update=_kafka_changes(settings, site)),
            "rpc": settings.rpc.model_copy(update=addresses),
        }
    )


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
