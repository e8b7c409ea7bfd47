"""A worker's stage record, checked against the lease inside it."""

from __future__ import annotations

from dataclasses import dataclass

from tessella_p2p.base.errors import InvalidSignature, NotAuthorized
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.dht.stage_records import check_record_time, exceeded, lease_counts, signed_lease, signed_stage
from tessella_p2p.wire.messages import Lease, StageRecord


@dataclass(frozen=True, slots=True)
class LeasedStage:
    """A stage record that its worker signed, with the lease of ``issuer`` that covers exactly its layers."""

    raw: bytes
    sequence: int
    expires_at: int
    stage: StageRecord
    lease: Lease
    issuer: PeerId

    @property
    def layers(self) -> LayerRange:
        """The range that is served."""
        return LayerRange(*self.stage.layers)


def verify_stage_record(raw: bytes, peer: PeerId, orchestrators: frozenset[PeerId], now_ms: int) -> LeasedStage:
    """Check a record that ``peer`` sent, as its readers will: with a lease of one of ``orchestrators``.

    The record has to be in force; its lease may be over by the grace for an outage, in which no lease could be renewed.

    Raises:
        RemoteProtocolError: not the peer's, expired, or without a lease of one of them for what it states.
        NotAuthorized: the lease is over by more than the grace.
    """
    signed = signed_stage(raw)
    envelope = signed.envelope
    if envelope.signer != peer:
        raise InvalidSignature(f"a stage record signed by {envelope.signer}, not by {peer}")
    check_record_time(envelope, now_ms)
    leased, lease = signed_lease(signed.record.lease)
    if leased.signer not in orchestrators:
        raise InvalidSignature(f"a lease signed by {leased.signer}, not by {', '.join(sorted(orchestrators))}")
    if not lease_counts(leased.expires_at, now_ms, orchestrator_reachable=False):
        raise NotAuthorized(f"lease {lease.serial} of {peer} is long over: register again")
    if foreign := exceeded(signed, lease):
        raise InvalidSignature(
            f"the stage record of {peer} states a {foreign} that its lease {lease.serial} does not grant"
        ).blame(peer)
    return LeasedStage(envelope.raw, envelope.sequence, envelope.expires_at, signed.record, lease, leased.signer)
