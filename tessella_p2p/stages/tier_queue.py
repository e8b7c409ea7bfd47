"""Who goes next when not everybody can: a weighted fair queue over the tiers (pure).

Each tier has a line of its own, first come, first served. While several lines wait, places are shared by weight (self-clocked fair
queueing: S. J. Golestani, INFOCOM 1994): of 21 places VIP gets 16, Standard 4 and Leech 1, in that order. A line that was empty saves
nothing up, and owes nothing. So nobody starves, and nobody who waits alone is held up.

What is promised, for the item at ``place`` (from 0) of a line whose share is one place in ``k``, whatever comes after it: it is taken
within the next ``k * (place + 1) + LATE`` takes. `tests/stages/test_tier_queue.py` looks for counterexamples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Final, Generic, TypeVar

from tessella_p2p.base.errors import Overloaded
from tessella_p2p.wire.messages import Tier

T = TypeVar("T")

SHARES: Final[Mapping[Tier, int]] = {"VIP": 16, "Standard": 4, "Leech": 1}
"""Places out of their sum; of two whose turn it is, the first here goes first."""
TOTAL_SHARES: Final = sum(SHARES.values())
LATE: Final = TOTAL_SHARES
"""How many places a line may be behind its share."""
_STRIDES: Final[Mapping[Tier, int]] = {tier: max(SHARES.values()) // share for tier, share in SHARES.items()}


class TierQueue(Generic[T]):
    """Items that wait, by tier.

    Args:
        max_waiting: of each tier; so a crowd of one tier takes no room of another.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._lines: dict[Tier, deque[T]] = {tier: deque() for tier in SHARES}
        # When, in virtual time, a line's first item has had its turn; of an empty line, when its last one had. The least is next.
        self._ends: dict[Tier, int] = dict.fromkeys(SHARES, 0)
        self._now = 0  # the end of whoever was taken last

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[T]:
        for line in self._lines.values():
            yield from line

    def num_waiting(self, tier: Tier) -> int:
        """Items of one tier."""
        return len(self._lines[tier])

    def put(self, item: T, tier: Tier) -> None:
        """Wait behind the others of the tier.

        Raises:
            Overloaded: the line is full.
        """
        line = self._lines[tier]
        if len(line) >= self._max_waiting:
            raise Overloaded(f"{len(line)} of tier {tier} wait already; try again later")
        if not line:
            self._ends[tier] = max(self._ends[tier], self._now) + _STRIDES[tier]
        line.append(item)

    def put_back(self, item: T, tier: Tier) -> None:
        """Return what was taken just now; of several, the last one first. Who comes now is not behind it for having been taken."""
        if self._lines[tier]:
            self._ends[tier] -= _STRIDES[tier]
        self._now = min(self._now, self._ends[tier] - _STRIDES[tier])
        self._lines[tier].appendleft(item)

    def peek(self) -> T | None:
        """Whose turn it is; None when nobody waits."""
        tier = self._next()
        return None if tier is None else self._lines[tier][0]

    def _next(self) -> Tier | None:
        return min((tier for tier, line in self._lines.items() if line), key=self._ends.__getitem__, default=None)

    def take(self) -> T | None:
        """Whose turn it is, and is over with that; None when nobody waits."""
        tier = self._next()
        if tier is None:
            return None
        line, self._now = self._lines[tier], self._ends[tier]
        item = line.popleft()
        if line:
            self._ends[tier] += _STRIDES[tier]
        return item

    def drop(self, item: T) -> bool:
        """Wait no longer; whether the item did."""
        for line in self._lines.values():
            if item in line:
                line.remove(item)
                return True
        return False
