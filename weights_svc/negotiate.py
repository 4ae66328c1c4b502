"""Which version a receiver takes, in which form, and from where: a pure function of what is held here, who else hands
out, and what the receiver asks for.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from streamrl.errors import UnavailableError
from streamrl.v1.weights_pb2 import (
    TRANSFER_FORMAT_DELTA,
    TRANSFER_FORMAT_FULL,
    TRANSFER_FORMAT_NCCL,
    NegotiateRequest,
    TransferFormat,
    VersionManifest,
)
from streamrl.weight_pairs import comparable, differing_bytes


@dataclass(frozen=True, slots=True)
class Relay:
    """A weights_svc that takes its versions from this one, and is there."""

    site: str
    address: str
    """host:port where it hands them out."""


@dataclass(frozen=True, slots=True)
class FabricOffer:
    """What this service can send to the receivers of one fabric at once."""

    fabric: str
    site: str
    weight_versions: frozenset[int]


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """What the receiver should do."""

    weight_version: int
    format: "TransferFormat.ValueType"
    transfer_bytes: int
    """What a fetch will send, as a difference at most: 0 when the receiver already holds this version."""
    base_weight_version: int = 0
    """Of a difference: the version that it is to."""
    source_address: str = ""
    """Where to fetch; empty: here."""


def negotiate(
    versions: Mapping[int, VersionManifest],
    request: NegotiateRequest,
    *,
    anchor_every: int = 0,
    relays: Collection[Relay] = (),
    fabric: FabricOffer | None = None,
) -> TransferPlan:
    """Plans a transfer.

    The newest version is offered if it is at least `min_weight_version`, unless exactly one is asked for. A receiver
    that holds another version and takes differences gets one, unless that version is not here, is here with another
    digest, is weights where the offered one is adapters, or an anchor lies between the two. A receiver that holds
    nothing here has in common gets the whole version, from the relay of its own site where there is one. A relay itself
    is sent to nobody else: two of one site would wait for each other. A receiver on the fabric of this service that
    asks for exactly a version that is offered there, and takes that form, gets it so, whatever else it holds or takes;
    whether all others come too is seen afterwards (rendezvous.py).

    Args:
        versions: what can be handed out here, by weight version.
        anchor_every: versions that are multiples of this go in full; 0: none has to.
        relays: those that are there now.
        fabric: what can be sent by NCCL now; None: nothing.

    Raises:
        ValueError: the receiver understands no form that there is.
        UnavailableError: nothing is announced yet that is new enough; it may come.
        LookupError: the exact version is not here, and will not come by waiting.
    """
    formats = set(request.formats)
    if TRANSFER_FORMAT_FULL not in formats:
        raise ValueError("the receiver does not take whole tensors: expected TRANSFER_FORMAT_FULL among its forms")
    weight_version = _choose(versions, request)
    offered = versions[weight_version]
    holds_any = request.HasField("held_weight_version")
    held_version = request.held_weight_version
    if holds_any and held_version == weight_version and request.held_digest == offered.digest:
        return TransferPlan(weight_version, TRANSFER_FORMAT_FULL, 0)
    if fabric is not None and _shares(fabric, request) and weight_version in fabric.weight_versions:
        return TransferPlan(weight_version, TRANSFER_FORMAT_NCCL, offered.num_bytes)
    base = versions.get(held_version) if holds_any and TRANSFER_FORMAT_DELTA in formats else None
    if (
        base is not None
        and base is not offered
        and base.digest == request.held_digest
        and comparable(base, offered)
        and not crosses_anchor(held_version, weight_version, anchor_every)
    ):
        return TransferPlan(
            weight_version, TRANSFER_FORMAT_DELTA, differing_bytes(base, offered), base_weight_version=held_version
        )
    return TransferPlan(
        weight_version, TRANSFER_FORMAT_FULL, offered.num_bytes, source_address=_nearest(relays, request)
    )


def crosses_anchor(base_weight_version: int, weight_version: int, anchor_every: int) -> bool:
    """Whether a multiple of `anchor_every` lies behind the one and not behind the other."""
    return anchor_every > 0 and base_weight_version // anchor_every != weight_version // anchor_every


def _shares(fabric: FabricOffer, request: NegotiateRequest) -> bool:
    return (
        TRANSFER_FORMAT_NCCL in request.formats
        and request.HasField("exact_weight_version")
        and not request.serving_address
        and request.fabric == fabric.fabric != ""
        and request.site == fabric.site
    )


def _choose(versions: Mapping[int, VersionManifest], request: NegotiateRequest) -> int:
    if not versions:
        raise UnavailableError("no weight version is announced yet")
    if request.HasField("exact_weight_version"):
        if request.exact_weight_version not in versions:
            known = ", ".join(map(str, sorted(versions)))
            raise LookupError(f"weight version {request.exact_weight_version} is not here: versions {known} are")
        return request.exact_weight_version
    newest = max(versions)
    if newest < request.min_weight_version:
        raise UnavailableError(
            f"the newest weight version is {newest}: {request.min_weight_version} is not announced yet"
        )
    return newest


def _nearest(relays: Collection[Relay], request: NegotiateRequest) -> str:
    """The relay of the receiver's own site, if one is there and answers it; empty when this service is the nearest."""
    if not request.site or request.serving_address:
        return ""
    unreachable = set(request.unreachable_addresses)
    near = (relay.address for relay in relays if relay.site == request.site and relay.address not in unreachable)
    return min(near, default="")
