"""The ledger, computed again from its journal and from the proofs that were uploaded (pure).

None of the ledger's own code is used: envelopes are opened, sets of (layer, position) are counted, and that is all. A stage proves a
prefix of positions, so what a layer was paid for is kept as the set of positions itself, the slow and obvious way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from simulations.observations import LeaseGranted, Observations, unix_ms
from tessella_p2p.base.errors import TessellaError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import MICRO_PER_LAYER_POSITION, TICKET_OPEN_S
from tessella_p2p.ledger.changes import ProofSettled
from tessella_p2p.wire.envelope import open_envelope
from tessella_p2p.wire.messages import (
    LEASE,
    PROOF,
    RECEIPT,
    ROUTE,
    TICKET,
    Lease,
    Proof,
    ReceiptBody,
    RouteStatement,
    Ticket,
)

_OPEN_MS = round(TICKET_OPEN_S * 1000)


@dataclass(frozen=True, slots=True)
class _Evidence:
    """A proof that holds: who did what, for whose ticket, and how far a receipt confirms it."""

    worker: PeerId
    requester: str
    request_id: str
    layers: tuple[int, int]
    receipted: int
    max_positions: int


def ledger_problems(seen: Observations, root: bytes) -> Iterator[str]:
    """What in the journal is not backed by proofs, or was paid twice."""
    evidence: dict[bytes, _Evidence | str] = {}
    for judged in seen.proofs:
        digest, found = _evidence(judged.proof, seen, root, judged.at_s)
        evidence.setdefault(digest, found)
    paid: dict[tuple[str, str], set[tuple[int, int]]] = {}
    for entry in seen.journal:
        change = entry.change
        if not isinstance(change, ProofSettled):
            continue
        backing = evidence.get(change.payload_digest)
        what = f"{change.micro_credits} micro-credits to {change.worker} for {change.request_id}"
        if backing is None:
            yield f"{what}: no proof was uploaded"
        elif isinstance(backing, str):
            yield f"{what}: the proof does not hold: {backing}"
        else:
            yield from (f"{what}: {problem}" for problem in _unbacked(change, backing))
        before = paid.setdefault((change.requester, change.request_id), set())
        covered = set(product(range(*change.layers), range(change.paid_positions)))
        due = len(covered - before) * MICRO_PER_LAYER_POSITION
        if change.micro_credits != due:
            yield f"{what}: {due} were due, each layer and position once"
        before |= covered


def _unbacked(change: ProofSettled, backing: _Evidence) -> Iterator[str]:
    stated = (change.worker, change.requester, change.request_id, change.layers)
    proven = (backing.worker, backing.requester, backing.request_id, backing.layers)
    if stated != proven:
        yield "the proof is for something else"
    if change.paid_positions > min(backing.receipted, backing.max_positions):
        yield f"{change.paid_positions} positions are paid, {backing.receipted} are confirmed"


def _evidence(raw: bytes, seen: Observations, root: bytes, at_s: float) -> tuple[bytes, _Evidence | str]:
    """The digest of a proof's payload, and what it shows or why it shows nothing."""
    try:
        envelope = open_envelope(raw, PROOF, now_ms=None, audience=seen.orchestrator)
        digest = hashlib.sha256(envelope.payload).digest()
    except TessellaError as error:
        return hashlib.sha256(raw).digest(), str(error)
    try:
        proof = envelope.message(Proof)
        ticket = open_envelope(proof.ticket, TICKET, now_ms=None, signer=seen.orchestrator).message(Ticket)
        lease = open_envelope(proof.lease, LEASE, now_ms=None, signer=seen.orchestrator).message(Lease)
        route = open_envelope(proof.route, ROUTE, now_ms=None, signer=PeerId(ticket.requester)).message(RouteStatement)
        receipted = _receipted(proof, envelope.signer, _receiver(route, envelope.signer, PeerId(ticket.requester)))
    except TessellaError as error:
        return digest, str(error)
    layers = proof.layers
    routed = (route.request_id, route.session, route.epoch) == (proof.request_id, proof.session, proof.epoch)
    if not routed or (envelope.signer, layers) not in route.stages:
        return digest, "its route is for something else"
    if (ticket.request_id, ticket.manifest_root) != (proof.request_id, root):
        return digest, "its ticket is for something else"
    if (lease.peer_id, lease.layers, lease.manifest_root) != (envelope.signer, layers, root):
        return digest, "its lease is for something else"
    if not _granted(seen.leases, lease, at_s):
        return digest, f"lease {lease.serial} was never granted"
    if not ticket.open_before - _OPEN_MS <= proof.opened_at <= unix_ms(at_s):
        return digest, "its session was opened before its ticket was minted, or after its upload"
    return digest, _Evidence(
        envelope.signer, ticket.requester, ticket.request_id, layers, receipted, ticket.max_positions
    )


def _receiver(route: RouteStatement, worker: PeerId, requester: PeerId) -> PeerId:
    """Who got what a stage sent: the first one in the route whose layers come after the worker's."""
    end = max((layers[1] for peer, layers in route.stages if peer == worker), default=0)
    return next((PeerId(peer) for peer, layers in route.stages if layers[0] == end), requester)


def _receipted(proof: Proof, worker: PeerId, receiver: PeerId) -> int:
    """Up to where the receiver's signature covers exactly what the proof says was sent."""
    if proof.receipt is None:
        return 0
    receipt = open_envelope(proof.receipt, RECEIPT, now_ms=None, audience=worker, signer=receiver).message(ReceiptBody)
    bound = (receipt.request_id, receipt.session, receipt.epoch, receipt.sender)
    if bound != (proof.request_id, proof.session, proof.epoch, worker):
        return 0
    said = {proof.positions: proof.output_digest, **{mark.positions: mark.output for mark in proof.marks}}
    return receipt.positions if said.get(receipt.positions) == receipt.digest else 0


def _granted(leases: list[LeaseGranted], lease: Lease, at_s: float) -> bool:
    return any(
        (one.peer, one.serial, one.layers) == (lease.peer_id, lease.serial, lease.layers) and one.at_s <= at_s
        for one in leases
    )
