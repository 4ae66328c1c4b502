"""A dispatch from end to end, for tests without the loop that does it in steps."""

from scheduler_svc.dispatcher import Outgoing
from scheduler_svc.ledger import Ledger


def decide(ledger: Ledger, now: float) -> list[Outgoing]:
    """A round of the loop: everything that is due, and all that waits dispatched at once."""
    ledger.advance(now)
    outgoing: list[Outgoing] = []
    while (draft := ledger.draft(now)) is not None:
        for _ in draft.parts():
            pass
        for placings in draft.plan():
            outgoing += ledger.carry_out(draft, placings, now)
    if (draft := ledger.draft_ahead(now)) is not None:
        for _ in draft.parts():
            pass
        draft.plan()
    ledger.balance(now)
    return outgoing
