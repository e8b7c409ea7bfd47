"""Stage records: what a reader believes, and why.

A record is an envelope that its peer signed, and in it a lease that an orchestrator signed. Where the bytes came from (the DHT, a
neighbour, the orchestrator's list) does not matter. `signed_stage` checks what anybody can check: form and signature.
`verify_stage` checks what a reader needs before it uses the stage: the time, and a lease of an orchestrator that the reader's own
configuration pins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from tessella_p2p.base.errors import Expired, MalformedMessage, NotAuthorized
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import KAD_MAX_VALUE_BYTES, OUTAGE_GRACE_S, RECORD_TTL_S
from tessella_p2p.wire.envelope import Envelope, check_window, open_envelope
from tessella_p2p.wire.messages import LEASE, STAGE_RECORD, Lease, StageRecord, StageState

RECORD_TTL_MS = round(RECORD_TTL_S * 1000)
OUTAGE_GRACE_MS = round(OUTAGE_GRACE_S * 1000)


@dataclass(frozen=True, slots=True)
class SignedStage:
    """A stage record whose form and signature are right; nothing is said about its time or its lease."""

    envelope: Envelope
    record: StageRecord


@dataclass(frozen=True, slots=True)
class VerifiedStage:
    """A stage that may be used, as of the time it was verified. Times are Unix milliseconds, ``layers`` is half-open.

    ``lease_serial`` counts within ``orchestrator``, who signed the lease; ``raw`` is the record's envelope, byte for byte.
    """

    peer_id: PeerId
    addresses: tuple[str, ...]
    layers: LayerRange
    total_layers: int
    recipe: str
    model_id: str
    manifest_root: bytes
    queue_depth: int
    state: StageState
    max_positions: int
    sequence: int
    orchestrator: PeerId
    lease_serial: int
    lease_expires_at: int
    issued_at: int
    expires_at: int
    raw: bytes
    canary: bool = False
    """It answers with a known-wrong tensor, for audits: no route goes through it."""


def signed_stage(raw: bytes) -> SignedStage:
    """The record in ``raw``, once its form and its signature are right.

    Verdicts are remembered, because the same bytes arrive from three sources; they depend on nothing but the bytes.

    Raises:
        MalformedMessage, VersionMismatch, InvalidSignature: says what is wrong.
    """
    if len(raw) > KAD_MAX_VALUE_BYTES:
        raise MalformedMessage(f"a stage record of {len(raw)} bytes is over the limit of {KAD_MAX_VALUE_BYTES}")
    return _signed_stage(raw)


@lru_cache(maxsize=4096)
def _signed_stage(raw: bytes) -> SignedStage:
    envelope = open_envelope(raw, STAGE_RECORD, now_ms=None)
    record = envelope.message(StageRecord)
    if record.layers[1] > record.total_layers:
        raise MalformedMessage(f"{envelope.signer} states layers {record.layers} of {record.total_layers}")
    return SignedStage(envelope, record)


@lru_cache(maxsize=4096)
def signed_lease(raw: bytes) -> tuple[Envelope, Lease]:
    """The lease in ``raw``, once its form and its signature are right; its time and its signer are the caller's to judge.

    Raises:
        MalformedMessage, VersionMismatch, InvalidSignature: says what is wrong.
    """
    envelope = open_envelope(raw, LEASE, now_ms=None)
    return envelope, envelope.message(Lease)


def check_record_time(envelope: Envelope, now_ms: int) -> None:
    """Refuse a record that is expired, of the future, or valid for longer than records are.

    Raises:
        Expired, MalformedMessage: says which.
    """
    check_window("stage record", envelope.issued_at, envelope.expires_at, now_ms)
    if envelope.expires_at - envelope.issued_at > RECORD_TTL_MS:
        raise MalformedMessage(f"{envelope.signer}'s stage record is valid for over {RECORD_TTL_S:.0f} s")


def lease_counts(
    lease_expires_at: int, now_ms: int, *, orchestrator_reachable: bool, outage_grace_ms: int = OUTAGE_GRACE_MS
) -> bool:
    """Whether a lease counts: until it expires, and the outage grace longer while nobody could renew it."""
    return now_ms < lease_expires_at + (0 if orchestrator_reachable else outage_grace_ms)


def verify_stage(
    raw: bytes,
    *,
    pins: frozenset[PeerId],
    now_ms: int,
    orchestrator_reachable: bool = True,
    outage_grace_ms: int = OUTAGE_GRACE_MS,
    serials: Mapping[tuple[PeerId, PeerId], int] | None = None,
    revoked: Mapping[tuple[PeerId, PeerId], int] | None = None,
) -> VerifiedStage:
    """Verify a stage record and the lease in it.

    Args:
        raw: the record's envelope.
        pins: the orchestrators whose leases count; they come from the node's own configuration and from nowhere else.
        now_ms: the time to judge by.
        orchestrator_reachable: False lets an expired lease count for the outage grace.
        outage_grace_ms: how long that is.
        serials: the newest lease serial seen, by (orchestrator, peer); an older lease is superseded.
        revoked: up to which serial leases were taken away, by (orchestrator, peer).

    Raises:
        MalformedMessage, VersionMismatch: no record.
        InvalidSignature: the record's or the lease's signature is not its signer's.
        Expired: the record or the lease is over, or not yet valid.
        NotAuthorized: the lease is of an orchestrator that is not pinned, for another peer, model, recipe or range, superseded, or was
            taken away.
    """
    signed = signed_stage(raw)
    check_record_time(signed.envelope, now_ms)
    stage, lease = _leased_stage(raw)
    if stage.orchestrator not in pins:
        raise NotAuthorized(f"{stage.peer_id}'s lease is signed by {stage.orchestrator}, which is not pinned here")
    newest = (serials or {}).get((stage.orchestrator, stage.peer_id), 0)
    if stage.lease_serial < newest:
        raise NotAuthorized(f"{stage.peer_id}'s lease {stage.lease_serial} is superseded by lease {newest}")
    if stage.lease_serial <= (revoked or {}).get((stage.orchestrator, stage.peer_id), -1):
        raise NotAuthorized(f"{stage.peer_id}'s lease {stage.lease_serial} was taken away")
    # Only the start of the lease's window is judged here; its end has the outage grace.
    check_window("lease", lease.issued_at, max(lease.expires_at, now_ms + 1), now_ms)
    if not lease_counts(
        lease.expires_at, now_ms, orchestrator_reachable=orchestrator_reachable, outage_grace_ms=outage_grace_ms
    ):
        raise Expired(f"{stage.peer_id}'s lease expired {(now_ms - lease.expires_at) / 1000:.0f} s ago")
    return stage


@lru_cache(maxsize=4096)
def _leased_stage(raw: bytes) -> tuple[VerifiedStage, Envelope]:
    """What of `verify_stage` depends on nothing but the bytes: the stage, and the envelope of the lease that grants it."""
    signed = signed_stage(raw)
    envelope, record = signed.envelope, signed.record
    lease_envelope, lease = signed_lease(record.lease)
    if foreign := exceeded(signed, lease):
        raise NotAuthorized(f"{envelope.signer} states a {foreign} that its lease {lease.serial} does not grant")
    stage = VerifiedStage(
        peer_id=envelope.signer,
        addresses=record.addresses,
        layers=LayerRange(*record.layers),
        total_layers=record.total_layers,
        recipe=record.recipe,
        model_id=record.model_id,
        manifest_root=record.manifest_root,
        queue_depth=record.queue_depth,
        state=record.state,
        max_positions=record.max_positions,
        sequence=envelope.sequence,
        orchestrator=lease_envelope.signer,
        lease_serial=lease.serial,
        lease_expires_at=lease_envelope.expires_at,
        issued_at=envelope.issued_at,
        expires_at=envelope.expires_at,
        raw=envelope.raw,
        canary=record.canary,
    )
    return stage, lease_envelope


def exceeded(signed: SignedStage, lease: Lease) -> str | None:
    """What a record states and its lease does not grant (the peer, the model, …); None where the lease is for exactly this stage.

    A canary's record that does not say so is one of them: it would draw sessions that it answers wrongly.
    """
    record = signed.record
    stated = (
        signed.envelope.signer,
        record.model_id,
        record.manifest_root,
        record.recipe,
        record.layers,
        record.canary,
    )
    granted = (lease.peer_id, lease.model_id, lease.manifest_root, lease.recipe, lease.layers, lease.canary)
    names = ("peer", "model", "manifest root", "recipe", "range", "standing as a canary or none")
    return next((name for name, one, other in zip(names, stated, granted, strict=True) if one != other), None)
