"""What a misspelt name was probably meant to be, as the end of a sentence."""

import difflib
from collections.abc import Iterable


def nearest(name: str, names: Iterable[str]) -> str:
    """ " (did you mean X?)" where a known name is near, else nothing."""
    near = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {near[0]}?)" if near else ""
