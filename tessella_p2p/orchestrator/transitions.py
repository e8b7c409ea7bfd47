"""What becomes of one member: registered, taken in again, heard, moved, silent (pure). ``members`` says when."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from tessella_p2p.base.errors import NotAuthorized
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.model.coverage import walk
from tessella_p2p.orchestrator.admission import OFFLINE_MS
from tessella_p2p.orchestrator.leases import IssuedLease
from tessella_p2p.orchestrator.member import ASSIGNED, Member, MemberState, Move
from tessella_p2p.orchestrator.stage_records import LeasedStage
from tessella_p2p.orchestrator.terms import ServedModel
from tessella_p2p.wire.messages import Register


def registered(
    peer: PeerId,
    request: Register,
    model: ServedModel,
    layers: LayerRange,
    issued: IssuedLease,
    now_ms: int,
    grace_ms: int,
) -> Member:
    """The member that a granted request makes; it may be silent for ``grace_ms`` while it loads."""
    return Member(
        peer_id=peer,
        model_id=model.model_id,
        manifest_root=model.manifest_root,
        recipe=request.recipe,
        layers=layers,
        state=MemberState.PENDING_LOAD,
        serial=issued.serial,
        lease=issued.sealed,
        lease_expires_at=issued.expires_at,
        last_seen=now_ms,
        silent_until=now_ms + grace_ms,
        addresses=request.addresses,
        claim_mb=request.claim_mb,
        device=request.device,
        bound=None if request.layers is None else LayerRange(*request.layers),
        canary=request.canary,
        api_url=request.api_url,
        instance=request.instance,
    )


def readmitted(found: LeasedStage, model: ServedModel, before: Member | None, now_ms: int) -> Member:
    """The member that a serving worker's record and lease make, with what is known of it besides."""
    return Member(
        peer_id=PeerId(found.lease.peer_id),
        model_id=model.model_id,
        manifest_root=model.manifest_root,
        recipe=found.lease.recipe,
        layers=found.layers,
        state=MemberState.READY,
        serial=found.lease.serial,
        lease=found.stage.lease,
        lease_expires_at=0,  # so that it gets a lease of its own right away
        last_seen=now_ms,
        silent_until=now_ms,
        addresses=found.stage.addresses,
        record=found.raw,
        record_sequence=found.sequence,
        record_expires_at=found.expires_at,
        claim_mb=0 if before is None else before.claim_mb,
        device=None if before is None else before.device,
        bound=None if before is None else before.bound,
        canary="off" if before is None or not found.lease.canary else before.canary,
        api_url=None if before is None else before.api_url,
    )


def with_record(member: Member, found: LeasedStage) -> Member:
    """The member with a newer record; as it is where it has that one or a newer one.

    Raises:
        NotAuthorized: the record is for other layers than are assigned.
    """
    assigned = (member.manifest_root, member.recipe, member.layers)
    if (found.stage.manifest_root, found.stage.recipe, found.layers) != assigned:
        raise NotAuthorized(
            f"the stage record is for layers {found.layers}, and {member.layers} are assigned: register again"
        )
    if found.sequence <= member.record_sequence:
        return member
    return replace(
        member,
        record=found.raw,
        record_sequence=found.sequence,
        record_expires_at=found.expires_at,
        addresses=found.stage.addresses,
    )


def known(peer: PeerId, member: Member | None, serial: int, now_ms: int) -> Member:
    """The member that a heartbeat under lease ``serial`` is of.

    Raises:
        NotAuthorized: it is none, or that lease is not in force.
    """
    if member is None or member.state is MemberState.LEFT:
        raise NotAuthorized(f"{peer} is not a member: register again")
    if serial > member.serial or member.lease_expires_at <= now_ms:
        raise NotAuthorized(f"lease {serial} of {peer} is not in force: register again")
    return member


def is_news(member: Member | None, serial: int, now_ms: int) -> bool:
    """Whether a worker shows a lease that this orchestrator knows nothing of: it may be its own, of before a restart or an order."""
    if member is None:
        return True
    return member.state is not MemberState.LEFT and (member.lease_expires_at <= now_ms or serial > member.serial)


def moved(member: Member, move: Move) -> Member:
    """The member once it shows the lease of its order: that is what it holds now."""
    return replace(
        member,
        layers=move.layers,
        state=MemberState.PENDING_LOAD,
        serial=move.serial,
        lease=move.lease,
        # A lease of the layers before may have been renewed meanwhile; then this one is not the newest, and is renewed too.
        lease_expires_at=move.lease_expires_at if move.serial > member.serial else 0,
        record=None,
        record_sequence=-1,
        record_expires_at=0,
        move=None,
    )


def may_keep(before: Member, others: Collection[LayerRange], total_layers: int) -> bool:
    """Whether a worker that registers again gets its range again.

    It does when nobody else has that, and while the range counts as its own; but a replica goes where a hole needs it.
    """
    if any(hole.contains(before.layers) for hole in walk(others, total_layers).holes):
        return True
    return before.state in ASSIGNED and not walk([*others, before.layers], total_layers).holes


def deadline(member: Member) -> int:
    """When a member will have been silent for too long, or be forgotten (Unix milliseconds)."""
    if member.state in (MemberState.OFFLINE, MemberState.LEFT):
        return max(member.lease_expires_at, member.last_seen + OFFLINE_MS)
    return member.silent_until
