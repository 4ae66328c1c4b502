"""A reward of one's own: any function of some of `prompt`, `response`, `answer`, `finished` and `metadata`, by name."""


def way_counted(*, response: str, answer: str, finished: bool) -> float:
    """The share of the way that was counted without a mistake; all of it only for an answer that ends there."""
    said, key = response.split(), answer.split()
    right = next((i for i, (word, wanted) in enumerate(zip(said, key, strict=False)) if word != wanted), len(said))
    share = min(right, len(key)) / max(len(said), len(key))
    return share if finished else share / 2
