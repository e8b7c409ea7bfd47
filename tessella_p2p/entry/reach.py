"""Whether the orchestrator can be reached, as an entry met it last, and for how long it can do without (pure).

Nobody waits for an orchestrator that did not answer just now: requests go on without it at once, and whoever follows its topology
finds out when it is back. Times are trio's, in seconds.
"""

from __future__ import annotations

from collections.abc import Callable

from tessella_p2p.base.errors import OrchestratorUnreachable


class Reach:
    """Taken for reachable at the beginning; the first try shows.

    Args:
        now: the time.
        grace_s: how long requests are served without it.
        tell: is told at each change.
    """

    def __init__(self, now: float, grace_s: float, tell: Callable[[bool], None]) -> None:
        self.is_reachable = True
        self._reached_at = now
        self._grace_s = grace_s
        self._tell = tell

    def reached(self, now: float) -> None:
        """It answered."""
        self._reached_at = now
        self._set(True)

    def lost(self) -> None:
        """It did not answer."""
        self._set(False)

    def _set(self, reachable: bool) -> None:
        if reachable != self.is_reachable:
            self.is_reachable = reachable
            self._tell(reachable)

    def outage_s(self, now: float) -> float:
        """How long ago it answered last, while it does not; else 0."""
        return 0.0 if self.is_reachable else now - self._reached_at

    def check(self, now: float) -> None:
        """See to it that a request may be served.

        Raises:
            OrchestratorUnreachable: the grace is over.
        """
        outage_s = self.outage_s(now)
        if outage_s > self._grace_s:
            raise OrchestratorUnreachable(
                f"no orchestrator has answered this node for {outage_s:.0f} s; it serves without one for "
                f"outage_grace_secs = {self._grace_s:.0f}, and will again as soon as one answers"
            )
