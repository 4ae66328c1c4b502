"""How models are named on a hub."""

import re

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def is_hub_name(path: str) -> bool:
    """Whether a path could be a name on a hub, owner/name; whether there is such a model only the hub knows."""
    return _HUB_NAME.fullmatch(path) is not None
