"""What a sealed proof shows by itself: signatures, times, and that ticket, lease, route and receipt belong to it.

Nothing here depends on the ledger's state, and nothing rests on the word of who uploaded the proof. ``settlement`` then decides
what it is worth.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Generic, cast

from tessella_p2p.base.errors import RefusalError, RemoteProtocolError
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import (
    CLOCK_SKEW_MS,
    ISSUANCE_PER_REQUESTER_DAY,
    MAX_PROOF_BYTES,
    MAX_REMEMBERED_BYTES,
    MAX_REMEMBERED_ENVELOPES,
    MAX_REMEMBERED_ROUTES,
    MICRO_PER_CREDIT,
)
from tessella_p2p.ledger.revocation import Revocation
from tessella_p2p.wire.envelope import Envelope, MessageT, decode_message, open_envelope
from tessella_p2p.wire.messages import (
    LEASE,
    PROOF,
    RECEIPT,
    ROUTE,
    TICKET,
    DigestMark,
    Lease,
    Proof,
    ReceiptBody,
    RouteStatement,
    Ticket,
)


class Code(StrEnum):
    """Why a proof is refused or held: the ``code`` of `Settled`, beside the codes of ``base.errors`` for damaged envelopes."""

    FOREIGN_TICKET = "foreign_ticket"
    FOREIGN_LEASE = "foreign_lease"
    FOREIGN_ROUTE = "foreign_route"
    FOREIGN_RECEIPT = "foreign_receipt"
    CANARY = "canary"
    UNLEASED_LAYERS = "unleased_layers"
    LEASE_NOT_IN_FORCE = "lease_not_in_force"
    LEASE_REVOKED = "lease_revoked"
    TICKET_NOT_OPEN = "ticket_not_open"
    TICKET_EXPIRED = "ticket_expired"
    TOO_MANY_POSITIONS = "too_many_positions"
    MALFORMED_MARKS = "malformed_marks"
    DIGEST_MISMATCH = "digest_mismatch"
    PROOF_CONFLICT = "proof_conflict"
    TOO_MANY_PROOFS = "too_many_proofs"
    ALREADY_PAID = "already_paid"
    # Held: not paid now, and not for ever.
    NO_RECEIPT = "no_receipt"
    RECEIPT_UNMATCHED = "receipt_unmatched"
    NEIGHBOUR_MISMATCH = "neighbour_mismatch"
    ISSUANCE_BOUND = "issuance_bound"
    REQUESTER_CANNOT_PAY = "requester_cannot_pay"
    BYTES_BOUND = "bytes_bound"


class ProofRefused(RefusalError):
    """A proof that is never paid. ``reason_code`` says which rule it breaks, ``peer`` (see `blame`) who signed it."""

    code = "proof_refused"
    http_status = 409

    def __init__(self, reason_code: str, message: str) -> None:
        super().__init__(message)
        self.reason_code = str(reason_code)


@dataclass(frozen=True, slots=True)
class SettlementTerms:
    """What proofs are judged by.

    Attributes:
        orchestrator: whose tickets count, and to whom proofs are addressed.
        total_layers: layers of each model, by manifest root: where its routes end. It may be a live view.
        issuance_per_day: micro-credits that the tickets on one account may bring into being in one day.
        lease_issuers: whose leases count; the orchestrator's own always do. None: everybody's, where another one has judged that.
        requester_pays: whether the account that a ticket is on pays for it, as far as it can, and nothing is brought into being.
        revoked: leases that the orchestrator took away, by peer; it may be a live view.
    """

    orchestrator: PeerId
    total_layers: Mapping[bytes, int]
    issuance_per_day: int = ISSUANCE_PER_REQUESTER_DAY * MICRO_PER_CREDIT
    lease_issuers: frozenset[PeerId] | None = frozenset()
    requester_pays: bool = False
    revoked: Mapping[PeerId, Revocation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.lease_issuers is not None:
            object.__setattr__(self, "lease_issuers", self.lease_issuers | {self.orchestrator})


@dataclass(frozen=True, slots=True)
class ProvenWork:
    """A proof that passed every check that needs no state.

    Attributes:
        worker: who signed it.
        payload_digest: SHA-256 of the signed payload; the same work sealed again has the same.
        layers: the proven range.
        route: SHA-256 of what the requester states of the route.
        upstream, downstream: the worker's neighbours there; at its ends the requester.
        points: the digests at each position that the proof states, ascending; the last one is at ``proof.positions``.
        receipted: positions that the downstream peer confirms with a digest that the proof states too; 0 without a receipt.
        unmatched: a receipt is there, but for a position at which the proof states no digest.
    """

    worker: PeerId
    payload_digest: bytes
    proof: Proof
    ticket: Ticket
    layers: LayerRange
    route: bytes
    upstream: PeerId
    downstream: PeerId
    points: tuple[DigestMark, ...]
    receipted: int
    unmatched: bool


def verify_proof(raw: bytes, terms: SettlementTerms, now_ms: int) -> ProvenWork:
    """Check one sealed proof.

    The proof's envelope may have expired: what bounds it is its ticket. Likewise the lease may be over now.

    Raises:
        ProofRefused: with the code of the rule that it breaks and, once its own signature has verified, the signer to blame.
    """
    if len(raw) > MAX_PROOF_BYTES:
        raise ProofRefused("malformed_message", f"a proof of {len(raw)} bytes; {MAX_PROOF_BYTES} are the limit")
    try:
        envelope = open_envelope(raw, PROOF, now_ms=None, audience=terms.orchestrator)
    except RemoteProtocolError as error:
        raise ProofRefused(error.code, f"the proof: {error}") from error
    try:
        return _verify_content(envelope, terms, now_ms)
    except RemoteProtocolError as error:
        raise ProofRefused(error.code, f"a proof of {envelope.signer}: {error}").blame(envelope.signer) from error
    except ProofRefused as error:
        raise error.blame(envelope.signer) from error.__cause__


def _verify_content(envelope: Envelope, terms: SettlementTerms, now_ms: int) -> ProvenWork:
    proof = decode_message(Proof, envelope.payload)
    worker, layers = envelope.signer, LayerRange(*proof.layers)
    ticket, minted_at = _ticket(proof, terms, now_ms)
    _check_lease(proof, worker, layers, minted_at, terms)
    route, upstream, downstream = _place(proof, worker, PeerId(ticket.requester), terms)
    points = _points(proof, worker)
    receipted, unmatched = _receipted(proof, worker, downstream, points)
    return ProvenWork(
        worker=worker,
        payload_digest=hashlib.sha256(envelope.payload).digest(),
        proof=proof,
        ticket=ticket,
        layers=layers,
        route=route,
        upstream=upstream,
        downstream=downstream,
        points=points,
        receipted=receipted,
        unmatched=unmatched,
    )


def _ticket(proof: Proof, terms: SettlementTerms, now_ms: int) -> tuple[Ticket, int]:
    """The proof's ticket and when it was minted."""
    opened = _opened(proof.ticket, TICKET, Ticket)
    ticket, minted_at = opened.body, opened.issued_at
    if opened.signer != terms.orchestrator:
        raise ProofRefused(Code.FOREIGN_TICKET, f"its ticket was minted by {opened.signer}; it settles there alone")
    if (ticket.request_id, ticket.manifest_root, ticket.recipe) != (
        proof.request_id,
        proof.manifest_root,
        proof.recipe,
    ):
        raise ProofRefused(Code.FOREIGN_TICKET, "its ticket is for another request, model or recipe")
    if proof.positions > ticket.max_positions:
        raise ProofRefused(
            Code.TOO_MANY_POSITIONS, f"{proof.positions} positions; its ticket allows {ticket.max_positions}"
        )
    opened_at = proof.opened_at
    if not minted_at - CLOCK_SKEW_MS <= opened_at < ticket.open_before or opened_at > now_ms + CLOCK_SKEW_MS:
        raise ProofRefused(Code.TICKET_NOT_OPEN, "its session was opened outside the time that its ticket allows")
    if now_ms >= ticket.settle_before:
        raise ProofRefused(
            Code.TICKET_EXPIRED, f"its ticket could be settled until {(now_ms - ticket.settle_before) / 1000:.0f} s ago"
        )
    return ticket, minted_at


def _check_lease(proof: Proof, worker: PeerId, layers: LayerRange, minted_at: int, terms: SettlementTerms) -> None:
    """A lease is for these layers and was in force when the session was opened.

    For these and no others: a stage serves what it was leased as a whole.

    During an outage leases are not renewed but tickets that were minted before it still open sessions, so a lease that was in
    force when the ticket was minted counts for that ticket. Work under a lease is paid up to the moment in which it is taken away.
    """
    opened = _opened(proof.lease, LEASE, Lease)
    lease = opened.body
    if terms.lease_issuers is not None and opened.signer not in terms.lease_issuers:
        raise ProofRefused(Code.FOREIGN_LEASE, f"its lease was signed by {opened.signer}")
    if lease.peer_id != worker:
        raise ProofRefused(Code.FOREIGN_LEASE, f"its lease is {lease.peer_id}'s")
    if lease.canary:
        raise ProofRefused(Code.CANARY, f"{worker} worked as a canary: its answers are known to be wrong")
    if (lease.manifest_root, lease.recipe) != (proof.manifest_root, proof.recipe):
        raise ProofRefused(Code.FOREIGN_LEASE, "its lease is for another model or recipe")
    if lease.layers != layers.as_tuple():
        raise ProofRefused(Code.UNLEASED_LAYERS, f"layers {layers}; {worker} was leased {LayerRange(*lease.layers)}")
    begins_at, ends_at = opened.issued_at - CLOCK_SKEW_MS, opened.expires_at
    if not begins_at <= proof.opened_at < ends_at and not begins_at <= minted_at < ends_at:
        raise ProofRefused(
            Code.LEASE_NOT_IN_FORCE, f"lease {lease.serial} was not in force when the session was opened"
        )
    revocation = terms.revoked.get(worker) if opened.signer == terms.orchestrator else None
    # When the session was opened the worker says; when the ticket was minted it cannot choose.
    opened_at = max(proof.opened_at, minted_at)
    if revocation is not None and lease.serial <= revocation.serial and opened_at >= revocation.at:
        raise ProofRefused(Code.LEASE_REVOKED, f"lease {lease.serial} was taken away before the session was opened")


def _place(proof: Proof, worker: PeerId, requester: PeerId, terms: SettlementTerms) -> tuple[bytes, PeerId, PeerId]:
    """The digest of the route statement, and between whom it puts the worker.

    A stage that could name its own neighbours would have accomplices sign for positions that never were.
    """
    opened = _open_route(proof.route)
    statement = opened.body
    if opened.signer != requester:
        raise ProofRefused(Code.FOREIGN_ROUTE, f"its route was signed by {opened.signer}, its ticket is {requester}'s")
    if (statement.request_id, statement.session, statement.epoch) != (proof.request_id, proof.session, proof.epoch):
        raise ProofRefused(Code.FOREIGN_ROUTE, "its route is of another request, session or epoch")
    if (worker, proof.layers) not in statement.stages:
        raise ProofRefused(Code.FOREIGN_ROUTE, f"its route does not have {worker} serve layers {proof.layers}")
    end = statement.stages[-1][1][1]
    if end != terms.total_layers.get(proof.manifest_root, end):
        raise ProofRefused(Code.FOREIGN_ROUTE, f"its route ends at layer {end}, which is not the model's last")
    index = statement.stages.index((worker, proof.layers))
    peers = (requester, *(PeerId(peer) for peer, _ in statement.stages), requester)
    return opened.payload_digest, peers[index], peers[index + 2]


@dataclass(frozen=True, slots=True)
class _Opened(Generic[MessageT]):
    """A ticket, a lease or a route statement whose signature was verified."""

    signer: PeerId
    issued_at: int
    expires_at: int
    payload_digest: bytes
    body: MessageT


def _opened(raw: bytes, domain: str, kind: type[MessageT]) -> _Opened[MessageT]:
    """Open a ticket or a lease.

    Each stage of a request sends the same ticket, and a worker the same lease with each of its proofs: what was opened is remembered
    by its bytes, of which it is a pure function. An envelope that is longer than honest ones are takes no room there.
    """
    if len(raw) > MAX_REMEMBERED_BYTES:
        return _open(raw, domain, kind)
    return cast(_Opened[MessageT], _remembered(raw, domain, kind))


def _open(raw: bytes, domain: str, kind: type[MessageT]) -> _Opened[MessageT]:
    envelope = open_envelope(raw, domain, now_ms=None)
    body = decode_message(kind, envelope.payload)
    digest = hashlib.sha256(envelope.payload).digest()
    return _Opened(envelope.signer, envelope.issued_at, envelope.expires_at, digest, body)


_remembered = lru_cache(maxsize=MAX_REMEMBERED_ENVELOPES)(_open)


@lru_cache(maxsize=MAX_REMEMBERED_ROUTES)
def _open_route(raw: bytes) -> _Opened[RouteStatement]:
    """Each stage of a chain sends the same one; apart from tickets and leases, for anybody may sign these."""
    return _open(raw, ROUTE, RouteStatement)


def _points(proof: Proof, worker: PeerId) -> tuple[DigestMark, ...]:
    """Marks and the final digests, strictly ascending."""
    points, final = proof.marks, (proof.positions, proof.input_digest, proof.output_digest)
    stated = points and (points[-1].positions, points[-1].input, points[-1].output) == final
    if proof.positions and not stated:
        points = (
            *points,
            DigestMark(positions=proof.positions, input=proof.input_digest, output=proof.output_digest),
        )
    at = 0
    for point in points:
        if not at < point.positions <= proof.positions:
            raise ProofRefused(
                Code.MALFORMED_MARKS, f"the marks of {worker} are not in ascending order within {proof.positions}"
            )
        at = point.positions
    return points


def _receipted(proof: Proof, worker: PeerId, downstream: PeerId, points: tuple[DigestMark, ...]) -> tuple[int, bool]:
    """Up to which position the downstream peer confirms the proof, and whether its receipt is for a position without digests."""
    if proof.receipt is None:
        return 0, False
    envelope = open_envelope(proof.receipt, RECEIPT, now_ms=None, audience=worker, signer=downstream)
    receipt = decode_message(ReceiptBody, envelope.payload)
    if (receipt.request_id, receipt.session, receipt.epoch, receipt.sender) != (
        proof.request_id,
        proof.session,
        proof.epoch,
        worker,
    ):
        raise ProofRefused(Code.FOREIGN_RECEIPT, "its receipt is for another request, session, epoch or sender")
    for point in points:
        if point.positions == receipt.positions:
            if point.output != receipt.digest:
                raise ProofRefused(
                    Code.DIGEST_MISMATCH,
                    f"the output digest of {worker} at position {point.positions} is not the one that {downstream} "
                    "received",
                )
            return receipt.positions, False
    return 0, receipt.positions > 0
