"""Which version a receiver takes, and in which form: a pure function of what is held here and what it asks for."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from streamrl.errors import UnavailableError
from streamrl.v1.weights_pb2 import TRANSFER_FORMAT_FULL, TransferFormat


@dataclass(frozen=True, slots=True)
class HeldVersion:
    """A version that can be handed out."""

    digest: str
    num_bytes: int
    """Of all tensors together."""


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """What the receiver should do."""

    weight_version: int
    format: "TransferFormat.ValueType"
    transfer_bytes: int
    """What a fetch will send: 0 when the receiver already holds this version."""


def negotiate(
    versions: Mapping[int, HeldVersion],
    *,
    formats: Iterable[int],
    min_weight_version: int = 0,
    exact_weight_version: int | None = None,
    held_weight_version: int | None = None,
    held_digest: str = "",
) -> TransferPlan:
    """Plans a transfer.

    Args:
        versions: what is announced here, by weight version.
        formats: TransferFormat values that the receiver understands.
        min_weight_version: the newest version is offered if it is at least this...
        exact_weight_version: ...unless exactly this one is asked for.
        held_weight_version, held_digest: what the receiver has; None when it has nothing. A version held with another
            digest is another version, and is sent whole.

    Raises:
        ValueError: the receiver understands no form that there is.
        UnavailableError: nothing is announced yet that is new enough; it may come.
        LookupError: the exact version is not here, and will not come by waiting.
    """
    if TRANSFER_FORMAT_FULL not in set(formats):
        raise ValueError("the receiver understands none of the forms that there are: expected TRANSFER_FORMAT_FULL")
    if not versions:
        raise UnavailableError("no weight version is announced yet")
    newest = max(versions)
    if exact_weight_version is not None:
        if exact_weight_version not in versions:
            known = ", ".join(map(str, sorted(versions)))
            raise LookupError(f"weight version {exact_weight_version} is not here: versions {known} are")
        weight_version = exact_weight_version
    elif newest < min_weight_version:
        raise UnavailableError(f"the newest weight version is {newest}: {min_weight_version} is not announced yet")
    else:
        weight_version = newest
    offered = versions[weight_version]
    held = held_weight_version == weight_version and held_digest == offered.digest
    return TransferPlan(weight_version, TRANSFER_FORMAT_FULL, 0 if held else offered.num_bytes)
