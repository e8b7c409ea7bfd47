"""A mesh on paper: keys, one model, and the tickets, leases, receipts and proofs that its peers sign."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from tessella_p2p.base.ids import LayerRange
from tessella_p2p.ledger.changes import Change
from tessella_p2p.ledger.evidence import ProofRefused, SettlementTerms, verify_proof
from tessella_p2p.ledger.settlement import refusal, settle
from tessella_p2p.ledger.state import LedgerState
from tessella_p2p.ledger.tables import DictTables
from tessella_p2p.wire import messages
from tessella_p2p.wire.envelope import seal
from tessella_p2p.wire.keys import NodeKey
from tessella_p2p.wire.marks import mark_stride
from tessella_p2p.wire.messages import (
    LEASE,
    PROOF,
    RECEIPT,
    TICKET,
    DigestMark,
    Lease,
    Proof,
    ReceiptBody,
    RouteStatement,
    Settled,
    Ticket,
)

NOW = 1_800_000_000_000
HOUR = 3_600_000
WEEK = 7 * 24 * HOUR
ROOT = bytes(range(32))
LAYERS = 30
RECIPE = "f32"


def key_of(name: str) -> NodeKey:
    """A key that depends on its name alone."""
    return NodeKey(hashlib.sha256(name.encode()).digest())


ORCHESTRATOR = key_of("orchestrator")
REQUESTER = key_of("requester")
WORKERS = tuple(key_of(f"worker {i}") for i in range(6))
SESSION = b"s" * 16
TERMS = SettlementTerms(ORCHESTRATOR.peer_id, {ROOT: LAYERS})


def digest_at(boundary: int, positions: int, salt: str = "") -> bytes:
    """The digest of the activations that cross a boundary between layers."""
    return hashlib.sha256(f"{boundary}/{positions}/{salt}".encode()).digest()


def ticket(
    request_id: str = "request-1",
    *,
    minter: NodeKey = ORCHESTRATOR,
    requester: NodeKey = REQUESTER,
    root: bytes = ROOT,
    recipe: str = RECIPE,
    max_positions: int = 1000,
    at: int = NOW,
    settle_in_ms: int = WEEK,
) -> bytes:
    body = Ticket(
        request_id=request_id,
        requester=requester.peer_id,
        manifest_root=root,
        recipe=recipe,
        tier="Leech",
        max_positions=max_positions,
        open_before=at + HOUR,
        settle_before=at + settle_in_ms,
    )
    return seal(minter, TICKET, body, sequence=1, now_ms=at, ttl_ms=HOUR)


def lease(
    worker: NodeKey,
    layers: tuple[int, int],
    *,
    signer: NodeKey = ORCHESTRATOR,
    root: bytes = ROOT,
    recipe: str = RECIPE,
    at: int = NOW - 60_000,
    ttl_ms: int = 600_000,
    canary: bool = False,
) -> bytes:
    body = Lease(
        serial=1,
        peer_id=worker.peer_id,
        model_id="toy",
        manifest_root=root,
        recipe=recipe,
        layers=layers,
        canary=canary,
    )
    return seal(signer, LEASE, body, sequence=1, now_ms=at, ttl_ms=ttl_ms)


def receipt(
    receiver: NodeKey,
    sender: NodeKey,
    positions: int,
    digest: bytes,
    *,
    request_id: str = "request-1",
    session: bytes = SESSION,
    epoch: int = 0,
) -> bytes:
    body = ReceiptBody(
        request_id=request_id,
        session=session,
        epoch=epoch,
        sender=sender.peer_id,
        positions=positions,
        digest=digest,
    )
    return seal(receiver, RECEIPT, body, sequence=1, now_ms=NOW, audience=sender.peer_id)


@dataclass(frozen=True)
class Stage:
    """One stage of a route on paper."""

    key: NodeKey
    layers: tuple[int, int]


ROUTE = (Stage(WORKERS[0], (0, 10)), Stage(WORKERS[1], (10, 20)), Stage(WORKERS[2], (20, 30)))


def route_statement(
    route: Sequence[Stage] = ROUTE,
    *,
    signer: NodeKey = REQUESTER,
    request_id: str = "request-1",
    session: bytes = SESSION,
    epoch: int = 0,
    at: int = NOW,
) -> bytes:
    body = RouteStatement(
        request_id=request_id,
        session=session,
        epoch=epoch,
        stages=tuple((stage.key.peer_id, stage.layers) for stage in route),
    )
    return seal(signer, messages.ROUTE, body, sequence=1, now_ms=at)


def proof_body(
    index: int = 1,
    *,
    route: Sequence[Stage] = ROUTE,
    positions: int = 300,
    receipted: int | None = -1,
    request_id: str = "request-1",
    session: bytes = SESSION,
    epoch: int = 0,
    opened_at: int = NOW,
    sealed_ticket: bytes | None = None,
    sealed_lease: bytes | None = None,
    sealed_route: bytes | None = None,
    sealed_receipt: bytes | None = None,
    requester: NodeKey = REQUESTER,
    salt_in: str = "",
    salt_out: str = "",
) -> Proof:
    """The proof of one stage; ``receipted`` −1 is a receipt for all positions, None is none."""
    stage = route[index]
    downstream = route[index + 1].key if index + 1 < len(route) else requester
    stride = mark_stride(positions)
    marks = tuple(
        DigestMark(
            positions=at,
            input=digest_at(stage.layers[0], at, salt_in),
            output=digest_at(stage.layers[1], at, salt_out),
        )
        for at in sorted({*range(100, positions, 100), *range(stride, positions, stride)})
    )
    if sealed_receipt is None and receipted is not None:
        covers = positions if receipted < 0 else receipted
        sealed_receipt = receipt(
            downstream,
            stage.key,
            covers,
            digest_at(stage.layers[1], covers, salt_out),
            request_id=request_id,
            session=session,
            epoch=epoch,
        )
    return Proof(
        request_id=request_id,
        ticket=sealed_ticket or ticket(request_id, requester=requester),
        lease=sealed_lease or lease(stage.key, stage.layers),
        route=sealed_route
        or route_statement(route, signer=requester, request_id=request_id, session=session, epoch=epoch),
        session=session,
        epoch=epoch,
        opened_at=opened_at,
        manifest_root=ROOT,
        recipe=RECIPE,
        layers=stage.layers,
        positions=positions,
        input_digest=digest_at(stage.layers[0], positions, salt_in),
        output_digest=digest_at(stage.layers[1], positions, salt_out),
        marks=marks,
        receipt=sealed_receipt,
        compute_us=1234,
    )


def seal_proof(body: Proof, signer: NodeKey, *, audience: str = ORCHESTRATOR.peer_id, sequence: int = 1) -> bytes:
    return seal(signer, PROOF, body, sequence=sequence, now_ms=NOW, audience=audience, ttl_ms=WEEK)


def credits_for(layers: LayerRange, positions: int) -> int:
    """Micro-credits of so many layer·positions."""
    return len(layers) * positions * 1_000


class PaperLedger:
    """The pure core, applied in memory."""

    def __init__(self, terms: SettlementTerms = TERMS) -> None:
        self.terms = terms
        self.tables = DictTables()
        self.state = LedgerState(self.tables)
        self.changes: list[Change] = []

    def settle(self, raw: bytes, now_ms: int = NOW) -> Settled:
        try:
            changes, settled = settle(self.state, verify_proof(raw, self.terms, now_ms), self.terms, now_ms)
        except ProofRefused as error:
            return refusal(error)
        for change in changes:
            self.state.apply(change, now_ms)
            self.changes.append(change)
        return settled

    def balance(self, key: NodeKey) -> int:
        return self.state.accounts.get(key.peer_id).micro_credits
