"""What one subscriber of a topology has not been told yet (pure).

A worker signs a new record with every heartbeat, and gossip carries those. News is what a route is chosen by and gossip may bring
late: who is there, under which lease, in which state, and where.
"""

from __future__ import annotations

from typing import TypeAlias

from tessella_p2p.base.ids import PeerId
from tessella_p2p.dht.stage_records import signed_stage
from tessella_p2p.wire.messages import Stages

_Told: TypeAlias = tuple[bytes, str, tuple[str, ...]]


class News:
    """Remembers what was told on one stream. At the beginning that is nothing, so everything is news."""

    def __init__(self) -> None:
        self._told: dict[PeerId, _Told] = {}

    def since(self, stages: Stages) -> Stages:
        """``stages`` with the records that say something new alone; they count as told.

        Args:
            stages: the whole list as it is now, of records whose signatures were verified.
        """
        gists = [_gist(raw) for raw in stages.records]
        fresh = tuple(
            raw for raw, (peer, gist) in zip(stages.records, gists, strict=True) if self._told.get(peer) != gist
        )
        self._told = dict(gists)
        return stages.model_copy(update={"records": fresh})


def _gist(raw: bytes) -> tuple[PeerId, _Told]:
    signed = signed_stage(raw)
    return signed.envelope.signer, (signed.record.lease, signed.record.state, signed.record.addresses)
