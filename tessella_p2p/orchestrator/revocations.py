"""Leases that were taken away before their time (pure).

A lease is a certificate that its holder shows around, so nobody can take it back; but everybody who follows the orchestrator can be
told that it counts no more. A revocation names a peer and the highest serial issued so far: whatever the peer holds is at or below it,
and whatever it may get later, once it is taken in again, is above.

It is told until no node could count those leases any more, an outage included, and remembered until no work under them can be settled.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import (
    MAX_LISTED_REVOCATIONS,
    MAX_REVOCATIONS,
    REVOCATION_KEPT_S,
    REVOCATION_TOLD_S,
)
from tessella_p2p.ledger.revocation import Revocation
from tessella_p2p.orchestrator.member import KeepRevocation
from tessella_p2p.wire.messages import RevokedLease

_TOLD_MS = int(REVOCATION_TOLD_S * 1000)
_KEPT_MS = int(REVOCATION_KEPT_S * 1000)


class Revocations:
    """The newest revocation of each peer."""

    def __init__(self) -> None:
        self._by_peer: dict[PeerId, Revocation] = {}  # oldest first

    @property
    def by_peer(self) -> Mapping[PeerId, Revocation]:
        """A live view."""
        return MappingProxyType(self._by_peer)

    def restore(self, kept: Mapping[PeerId, Revocation]) -> None:
        """Take up what was durable when the process before ended."""
        self._by_peer.clear()
        self._by_peer.update(sorted(kept.items(), key=lambda item: item[1].at))

    def revoke(self, peer: PeerId, serial: int, now_ms: int) -> list[KeepRevocation]:
        """Take away the leases of ``peer`` up to ``serial``; the effects make it durable."""
        self._by_peer.pop(peer, None)
        self._by_peer[peer] = revocation = Revocation(serial=serial, at=now_ms)
        effects = [KeepRevocation(peer, revocation)]
        while len(self._by_peer) > MAX_REVOCATIONS:
            effects.append(self._forget(next(iter(self._by_peer))))
        return effects

    def covers(self, peer: PeerId, serial: int) -> bool:
        """Whether a lease was taken away."""
        revocation = self._by_peer.get(peer)
        return revocation is not None and serial <= revocation.serial

    def listed(self, now_ms: int) -> tuple[RevokedLease, ...]:
        """What is told, the newest first, at most `MAX_LISTED_REVOCATIONS`."""
        told = [(peer, each) for peer, each in self._by_peer.items() if now_ms < each.at + _TOLD_MS]
        newest = reversed(told[-MAX_LISTED_REVOCATIONS:])
        return tuple(RevokedLease(peer_id=peer, serial=each.serial) for peer, each in newest)

    def pass_time(self, now_ms: int) -> list[KeepRevocation]:
        """Forget what no proof can rest on any more."""
        return [self._forget(peer) for peer, each in list(self._by_peer.items()) if each.at + _KEPT_MS <= now_ms]

    def _forget(self, peer: PeerId) -> KeepRevocation:
        del self._by_peer[peer]
        return KeepRevocation(peer, None)
