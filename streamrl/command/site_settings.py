"""Section `sites`: where services that stand at one datacenter find their broker and their peers.

It is read by the command alone, which hands each service the settings of its own site (sites.py).
"""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from streamrl.settings import Address, BrokerAddresses, Section


class SiteKafkaSection(Section):
    """What differs from section `kafka`."""

    bootstrap_servers: Annotated[BrokerAddresses, Field(min_length=1)]
    """host:port of one or more brokers of the site's own Kafka cluster, separated by commas."""
    client: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """librdkafka's own settings for this cluster, over those of `kafka.client`, key by key."""
    replication_factor: Annotated[int, Field(gt=0, le=100)] | None = None
    """Copies of each topic in this cluster. Left out: `kafka.replication_factor`."""


class SiteSection(Section):
    """One datacenter."""

    role: Literal["training", "generation"] = "generation"
    """training: the one site of trainer, scheduler and the weights_svc that versions are published to. generation:
    generators, and a relay of the weights if one is served; topic `prompts` does not exist there. Where no site is the
    training site, sections `kafka` and `rpc` describe it."""
    kafka: SiteKafkaSection | None = None
    """The site's own Kafka cluster. Left out: the one of section `kafka`."""
    scheduler: Address | None = None
    """Where services at this site find the scheduler. Left out: `rpc.scheduler_address`."""
    weights: Address | None = None
    """Where services at this site find weights_svc: that of the training site, or a relay of this site's own, to which
    each version comes once however many generators there are. Left out: `rpc.weights_address`."""
    relay: Address | None = None
    """Where `serve weights` listens at this site, as a relay. Left out: at `weights`."""
    upstream: Address | None = None
    """Where a relay at this site takes its versions from: the training site, or a relay of another. Left out: `weights`
    of the training site, or else `rpc.weights_address`."""


def _legal_site_name(value: str) -> str:
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,62}", value):
        raise ValueError(f"a site is named {value!r}: expected lower-case letters, digits and '-' (63 at most)")
    return value


SiteName = Annotated[str, AfterValidator(_legal_site_name)]
