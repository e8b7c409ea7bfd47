"""A worker's stage record, checked against the lease inside it."""

from __future__ import annotations

from dataclasses import dataclass

from tessella_p2p.base.errors import InvalidSignature, NotAuthorized
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import OUTAGE_GRACE_S
from tessella_p2p.wire.envelope import open_envelope
from tessella_p2p.wire.messages import LEASE, STAGE_RECORD, Lease, StageRecord

_GRACE_MS = int(OUTAGE_GRACE_S * 1000)


@dataclass(frozen=True, slots=True)
class LeasedStage:
    """A stage record that its worker signed, with the lease of this orchestrator that covers exactly its layers."""

    raw: bytes
    sequence: int
    expires_at: int
    stage: StageRecord
    lease: Lease

    @property
    def layers(self) -> LayerRange:
        """The range that is served."""
        return LayerRange(*self.stage.layers)


def verify_stage_record(raw: bytes, peer: PeerId, orchestrator: PeerId, now_ms: int) -> LeasedStage:
    """Check a record that ``peer`` sent to ``orchestrator``.

    The record has to be in force; its lease may be over by the grace for an outage, in which no lease could be renewed.

    Raises:
        RemoteProtocolError: not the peer's, expired, or without a lease of this orchestrator for what it states.
        NotAuthorized: the lease is over by more than the grace.
    """
    envelope = open_envelope(raw, STAGE_RECORD, now_ms=now_ms, signer=peer)
    stage = envelope.message(StageRecord)
    leased = open_envelope(stage.lease, LEASE, now_ms=None, signer=orchestrator)
    lease = leased.message(Lease)
    if leased.expires_at + _GRACE_MS <= now_ms:
        raise NotAuthorized(f"lease {lease.serial} of {peer} is long over: register again")
    stated = (peer, stage.model_id, stage.manifest_root, stage.recipe, stage.layers)
    if stated != (lease.peer_id, lease.model_id, lease.manifest_root, lease.recipe, lease.layers):
        raise InvalidSignature(f"the stage record of {peer} is not for what its lease covers").blame(peer)
    return LeasedStage(bytes(raw), envelope.sequence, envelope.expires_at, stage, lease)
