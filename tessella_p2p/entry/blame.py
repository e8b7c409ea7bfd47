"""Which peers failed an entry lately, and how much that counts against them (pure)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping

from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import MAX_BLAMED_PEERS

FADE_S = 30.0
ACCUSED = 100.0
"""What a failure costs the peer that is named, in units of one queued session."""
FULL = 20.0
"""What it costs a peer to be full: others first, for a while."""
SUSPECTED = 10.0
"""What it costs each stage that may have made the story up. A stage that accuses others is suspected each time, they but sometimes."""
_MOST = 1_000.0


class Blame:
    """Penalties of peers; each fades to nothing within `FADE_S`. Bounded, oldest first."""

    def __init__(self) -> None:
        self._penalties: OrderedDict[PeerId, tuple[float, float]] = OrderedDict()  # (penalty, trio time of it)
        self._failures: OrderedDict[PeerId, int] = OrderedDict()

    def note(
        self, accused: PeerId | None, suspects: Collection[PeerId], now: float, *, is_failure: bool = True
    ) -> None:
        """A session failed at ``now`` (seconds).

        Args:
            accused: whose fault it is said to be.
            suspects: who may have to do with it as well; the accused may be among them.
            is_failure: else the accused was at a limit: that is no failure, and is not counted as one.
        """
        for peer in suspects:
            if peer != accused:
                self._add(peer, SUSPECTED, now)
        if accused is not None:
            self._add(accused, ACCUSED if is_failure else FULL, now)
        if accused is not None and is_failure:
            self._failures[accused] = self._failures.pop(accused, 0) + 1
            if len(self._failures) > MAX_BLAMED_PEERS:
                self._failures.popitem(last=False)

    def penalties(self, now: float) -> dict[PeerId, float]:
        """What counts against each peer now."""
        return {peer: left for peer in self._penalties if (left := self._left(peer, now)) > 0.0}

    @property
    def failures(self) -> Mapping[PeerId, int]:
        """How often each peer was accused."""
        return self._failures

    def _add(self, peer: PeerId, penalty: float, now: float) -> None:
        self._penalties[peer] = (min(self._left(peer, now) + penalty, _MOST), now)
        self._penalties.move_to_end(peer)
        if len(self._penalties) > MAX_BLAMED_PEERS:
            self._penalties.popitem(last=False)

    def _left(self, peer: PeerId, now: float) -> float:
        penalty, at = self._penalties.get(peer, (0.0, now))
        return max(0.0, penalty * (1 - (now - at) / FADE_S))
