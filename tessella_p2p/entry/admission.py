"""How many requests an entry has open, and who waits for a place (shell over the tiers' queue)."""

from __future__ import annotations

import trio

from tessella_p2p.base.errors import Overloaded
from tessella_p2p.base.limits import ENTRY_PATIENCE_S, MAX_ENTRY_SESSIONS, MAX_ENTRY_WAITING
from tessella_p2p.stages.tier_queue import TierQueue
from tessella_p2p.wire.messages import Tier


class _Place:
    """What a request waits for."""

    def __init__(self) -> None:
        self.given = trio.Event()


class Admission:
    """At most ``places`` requests at once; others wait in the order of `stages.tier_queue`, and not for ever.

    Args:
        places: requests that are open at a time.
        max_waiting: requests of one tier that wait.
        patience_s: how long one waits.
    """

    def __init__(
        self,
        places: int = MAX_ENTRY_SESSIONS,
        max_waiting: int = MAX_ENTRY_WAITING,
        patience_s: float = ENTRY_PATIENCE_S,
    ) -> None:
        self._places = places
        self._patience_s = patience_s
        self._queue: TierQueue[_Place] = TierQueue(max_waiting)
        self._num_open = 0

    @property
    def num_open(self) -> int:
        """Requests that have a place."""
        return self._num_open

    @property
    def num_waiting(self) -> int:
        """Requests that wait for one."""
        return len(self._queue)

    async def enter(self, tier: Tier) -> bool:
        """Take a place, at once where there is one; `leave` has to follow. Cancelled, it takes none.

        Returns:
            Whether it had to wait, and things may have changed meanwhile.

        Raises:
            Overloaded: too many of the tier wait, or there was no place in time.
        """
        if self._num_open < self._places:
            self._num_open += 1
            return False
        place = _Place()
        try:
            self._queue.put(place, tier)
        except Overloaded as error:
            raise Overloaded(f"this entry has {self._num_open} requests open already; {error}") from None
        try:
            with trio.move_on_after(self._patience_s):
                await place.given.wait()
        except trio.Cancelled:
            if not self._queue.drop(place):
                self.leave()
            raise
        if self._queue.drop(place):
            raise Overloaded(f"this entry has {self._num_open} requests open already, and none ended in time")
        return True

    def leave(self) -> None:
        """Give a place back, to whoever is next."""
        following = self._queue.take()
        if following is None:
            self._num_open -= 1
        else:
            following.given.set()
