"""Unspent tickets that an entry holds for an outage (pure).

A ticket names its request, so a held one was asked for under a request id that no request has yet; the request that spends it takes
the id over. It is bound to a recipe and to a number of positions as well: tickets are held for the route that serves now, and for as
many positions as it holds, so that any request fits. They open sessions for an hour (`base.limits.TICKET_OPEN_S`) and are replaced in
time, so at the beginning of an outage each is good for a while.
"""

from __future__ import annotations

from dataclasses import dataclass

from tessella_p2p.base.limits import CLOCK_SKEW_MS, HELD_TICKET_LEFT_S
from tessella_p2p.wire.messages import Tier, capped

_RENEWED_MS = int(HELD_TICKET_LEFT_S * 1000)


@dataclass(frozen=True, slots=True)
class HeldTicket:
    """A ticket and what it is good for; ``raw`` is its envelope, ``open_before`` in Unix milliseconds."""

    request_id: str
    recipe: str
    max_positions: int
    tier: Tier
    open_before: int
    raw: bytes

    def fits(self, recipe: str, positions: int, open_at: int) -> bool:
        """Whether it opens a session of so many positions under ``recipe`` at ``open_at``, by any clock within the skew limit."""
        lasts = self.open_before > open_at + CLOCK_SKEW_MS
        return lasts and self.recipe == recipe and self.max_positions >= positions


class TicketReserve:
    """At most ``size`` tickets; each is given out once."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._held: list[HeldTicket] = []  # by open_before

    def __len__(self) -> int:
        return len(self._held)

    def lacking(self, recipe: str, positions: int, now_ms: int) -> int:
        """How many more have to be asked for, so that all are good for such requests for a while."""
        good = sum(ticket.fits(recipe, positions, now_ms + _RENEWED_MS) for ticket in self._held)
        return max(0, self.size - good)

    def put(self, ticket: HeldTicket) -> None:
        """Hold one more; where there are too many, the one that can be opened for the shortest time goes."""
        self._held.append(ticket)
        self._held.sort(key=lambda held: held.open_before)
        del self._held[: -self.size]

    def take(self, recipe: str, positions: int, now_ms: int, most: Tier | None = None) -> HeldTicket | None:
        """Spend the one that fits and is over first, of no better tier than ``most``; None where none fits."""
        for index, ticket in enumerate(self._held):
            if ticket.fits(recipe, positions, now_ms) and capped(ticket.tier, most) == ticket.tier:
                return self._held.pop(index)
        return None
