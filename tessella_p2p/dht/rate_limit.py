"""Token buckets, one for each peer."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

WhoT = TypeVar("WhoT")


class RateLimit(Generic[WhoT]):
    """How often each of many may do something.

    Args:
        per_s: tokens that come back a second.
        burst: tokens at the start, and the most that are kept.
        max_tracked: who are remembered; the least recent is forgotten, which costs a bound on it no more than its burst.
    """

    def __init__(self, per_s: float, burst: float, max_tracked: int = 4096) -> None:
        self._per_s = per_s
        self._burst = burst
        self._max_tracked = max_tracked
        self._buckets: OrderedDict[WhoT, tuple[float, float]] = OrderedDict()

    def allows(self, who: WhoT, now: float, cost: int = 1) -> bool:
        """Take ``cost`` tokens of ``who`` at ``now`` (monotonic seconds); False when there are fewer, and then none is taken."""
        return self.take(who, now, cost, least=cost) == cost

    def take(self, who: WhoT, now: float, wanted: int, least: int = 0) -> int:
        """Take up to ``wanted`` tokens of ``who`` at ``now`` (monotonic seconds), none of fewer than ``least``; how many."""
        tokens, since = self._buckets.pop(who, (self._burst, now))
        tokens = min(self._burst, tokens + max(0.0, now - since) * self._per_s)
        taken = min(wanted, int(tokens))
        taken = taken if taken >= least else 0
        self._buckets[who] = (tokens - taken, max(now, since))
        if len(self._buckets) > self._max_tracked:
            self._buckets.popitem(last=False)
        return taken
