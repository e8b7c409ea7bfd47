"""Members on disk: what is kept of one, and the member that a restarted orchestrator makes of it."""

from __future__ import annotations

from tessella_p2p.base.errors import RemoteProtocolError
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import OUTAGE_GRACE_S, RESTORED_GRACE_S
from tessella_p2p.ledger.assignments import Assignment
from tessella_p2p.orchestrator.catalogue import Catalogue
from tessella_p2p.orchestrator.member import ASSIGNED, Member, MemberState
from tessella_p2p.wire.envelope import open_envelope
from tessella_p2p.wire.messages import LEASE, Lease

_OUTAGE_MS = int(OUTAGE_GRACE_S * 1000)
_SILENCE_MS = int(RESTORED_GRACE_S * 1000)


def kept(member: Member, *, mesh_complete: bool) -> Assignment | None:
    """What is to be durable of a member; nothing of one that left.

    An order is not: who carried it out shows the lease that came with it.
    """
    if member.state is MemberState.LEFT:
        return None
    return Assignment(
        lease=member.lease,
        holds_range=member.state in ASSIGNED,
        mesh_complete=mesh_complete,
        claim_mb=member.claim_mb,
        device=member.device,
        bound=None if member.bound is None else member.bound.as_tuple(),
        canary=member.canary,
    )


def restored(
    peer: PeerId, assignment: Assignment, catalogue: Catalogue, orchestrator: PeerId, now_ms: int
) -> Member | None:
    """The member that ``peer`` is after a restart, until it is heard; None where the row certifies nothing any more.

    A lease that ran out while the orchestrator was down still holds its layers: the worker could not renew it, and its peers let it
    serve for the grace of an outage. Whether it lives is found out by waiting for its next word.
    """
    try:
        envelope = open_envelope(assignment.lease, LEASE, now_ms=None, signer=orchestrator)
        lease = envelope.message(Lease)
    except RemoteProtocolError:  # the orchestrator has another key now
        return None
    model = catalogue.find(lease.manifest_root)
    if model is None or (lease.peer_id, lease.model_id) != (peer, model.model_id):
        return None
    layers = LayerRange(*lease.layers)
    if lease.canary != (assignment.canary != "off"):
        return None
    if not model.serves(lease.recipe) or layers.end > model.total_layers:
        return None
    if envelope.expires_at + _OUTAGE_MS <= now_ms:
        return None
    return Member(
        peer_id=peer,
        model_id=model.model_id,
        manifest_root=model.manifest_root,
        recipe=lease.recipe,
        layers=layers,
        state=MemberState.PENDING_LOAD if assignment.holds_range else MemberState.OFFLINE,
        serial=lease.serial,
        lease=assignment.lease,
        lease_expires_at=envelope.expires_at,
        last_seen=now_ms,
        silent_until=now_ms + _SILENCE_MS,
        claim_mb=assignment.claim_mb,
        device=assignment.device,
        bound=None if assignment.bound is None else LayerRange(*assignment.bound),
        canary=assignment.canary,
    )
