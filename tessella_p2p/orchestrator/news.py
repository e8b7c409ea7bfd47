"""What one subscriber of a topology has not been told yet (pure).

A worker signs a new record with every heartbeat, and gossip carries those. News is what a route is chosen by and gossip may bring
late: who is there, under which lease, in which state, and where.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from tessella_p2p.base.ids import PeerId
from tessella_p2p.dht.stage_records import signed_stage
from tessella_p2p.wire.messages import RevokedLease, Stages

_Gist: TypeAlias = tuple[bytes, str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Listing:
    """The whole list at one time, and the gist of each record: made once for all who are told of it."""

    stages: Stages
    gists: tuple[tuple[PeerId, _Gist], ...]

    @classmethod
    def of(cls, stages: Stages) -> Listing:
        """The listing of records whose signatures were verified."""
        return cls(stages, tuple(map(_gist, stages.records)))


class News:
    """Remembers what was told on one stream. At the beginning that is nothing, so everything is news."""

    def __init__(self) -> None:
        self._told: dict[PeerId, _Gist] = {}
        self._revoked: frozenset[RevokedLease] = frozenset()

    def since(self, listing: Listing) -> Stages:
        """The list with the records and revocations that say something new alone; they count as told."""
        told, stages = self._told, listing.stages
        fresh = tuple(
            raw for raw, (peer, gist) in zip(stages.records, listing.gists, strict=True) if told.get(peer) != gist
        )
        self._told = dict(listing.gists)
        revoked = tuple(each for each in stages.revoked if each not in self._revoked)
        self._revoked = frozenset(stages.revoked)
        return stages.model_copy(update={"records": fresh, "revoked": revoked})


def _gist(raw: bytes) -> tuple[PeerId, _Gist]:
    signed = signed_stage(raw)
    return signed.envelope.signer, (signed.record.lease, signed.record.state, signed.record.addresses)
