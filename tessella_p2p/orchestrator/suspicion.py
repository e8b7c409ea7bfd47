"""Who is reported as failing by so many that the mesh should not count on it alone (pure).

A report is hearsay, and a peer id costs nothing. So a report counts only where it comes from a worker that serves, once per reporter;
several of them have to agree within a short time; a suspicion ends by itself; and what follows from one is no more than that a replica
may be moved beside the suspect. Nobody loses layers, lease or credit by what others say.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import MAX_MEMBERS, SUSPECT_REPORTERS, SUSPECT_SHARE, SUSPECT_WINDOW_S

_MAX_REPORTERS = 4 * SUSPECT_REPORTERS
"""Reporters of one worker that are remembered."""


class Suspicion:
    """What was reported lately."""

    def __init__(self) -> None:
        self._reports: OrderedDict[PeerId, OrderedDict[PeerId, float]] = OrderedDict()

    def report(self, failed: PeerId, by: PeerId, now: float) -> None:
        """``by``, a worker that serves, says that ``failed`` failed it, at ``now`` (monotonic seconds)."""
        reporters = self._reports.setdefault(failed, OrderedDict())
        reporters[by] = now
        reporters.move_to_end(by)
        self._reports.move_to_end(failed)
        if len(reporters) > _MAX_REPORTERS:
            reporters.popitem(last=False)
        if len(self._reports) > MAX_MEMBERS:
            self._reports.popitem(last=False)

    def suspects(self, members: Collection[PeerId], now: float) -> tuple[PeerId, ...]:
        """Those of ``members`` that are suspected now: who is reported by the most first, and of all of them a small share only."""
        counted = {peer: self._num_reporters(peer, now) for peer in members}
        found = sorted(
            (peer for peer, count in counted.items() if count >= SUSPECT_REPORTERS),
            key=lambda peer: (-counted[peer], peer),
        )
        return tuple(found[: len(members) // SUSPECT_SHARE])

    def _num_reporters(self, peer: PeerId, now: float) -> int:
        return sum(at > now - SUSPECT_WINDOW_S for at in self._reports.get(peer, {}).values())
