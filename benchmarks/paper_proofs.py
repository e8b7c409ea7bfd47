"""Proofs as three workers upload them, signed and complete, of sessions that nobody ran."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from benchmarks.net_wire import key_named
from benchmarks.orchestrator_process import KEY, MODEL, RECIPE
from tessella_p2p.base.limits import DIGEST_MARK_POSITIONS, LEASE_TTL_S, TICKET_OPEN_S, TICKET_SETTLE_S
from tessella_p2p.wire import messages as m
from tessella_p2p.wire.envelope import seal
from tessella_p2p.wire.keys import NodeKey

STAGES = ((0, 10), (10, 20), (20, 30))
POSITIONS = 300
WORKERS = tuple(key_named(f"worker {index}") for index in range(len(STAGES)))
REQUESTS_EACH = 500
"""Requests of one requester: its tickets bring no more credits into being a day than these are worth."""


def proofs(first: int, count: int, now_ms: int) -> Iterator[list[bytes]]:
    """For each of ``count`` requests, from number ``first`` on, the sealed proofs of its three stages."""
    leases = [_lease(index, now_ms) for index in range(len(STAGES))]
    for number in range(first, first + count):
        requester = key_named(f"requester {number // REQUESTS_EACH}")
        ticket = _ticket(number, requester.peer_id, now_ms)
        session = hashlib.sha256(f"session {number}".encode()).digest()[:16]
        route = _route(number, requester, session, now_ms)
        yield [_proof(number, index, session, ticket, leases[index], route, now_ms) for index in range(len(STAGES))]


def _lease(index: int, now_ms: int) -> bytes:
    body = m.Lease(
        serial=index + 1,
        peer_id=WORKERS[index].peer_id,
        model_id=MODEL.model_id,
        manifest_root=MODEL.manifest_root,
        recipe=RECIPE,
        layers=STAGES[index],
    )
    return seal(KEY, m.LEASE, body, sequence=index + 1, now_ms=now_ms, ttl_ms=round(LEASE_TTL_S * 1000))


def _ticket(number: int, requester: str, now_ms: int) -> bytes:
    opens_ms = round(TICKET_OPEN_S * 1000)
    body = m.Ticket(
        request_id=f"request-{number:08}",
        requester=requester,
        manifest_root=MODEL.manifest_root,
        recipe=RECIPE,
        tier="Standard",
        max_positions=2048,
        open_before=now_ms + opens_ms,
        settle_before=now_ms + opens_ms + round(TICKET_SETTLE_S * 1000),
    )
    return seal(KEY, m.TICKET, body, sequence=number + 1, now_ms=now_ms, ttl_ms=opens_ms)


def _route(number: int, requester: NodeKey, session: bytes, now_ms: int) -> bytes:
    body = m.RouteStatement(
        request_id=f"request-{number:08}",
        session=session,
        epoch=0,
        stages=tuple((key.peer_id, layers) for key, layers in zip(WORKERS, STAGES, strict=True)),
    )
    return seal(requester, m.ROUTE, body, sequence=number + 1, now_ms=now_ms)


def _digest(number: int, boundary: int, positions: int) -> bytes:
    return hashlib.sha256(f"{number}/{boundary}/{positions}".encode()).digest()


def _proof(number: int, index: int, session: bytes, ticket: bytes, lease: bytes, route: bytes, now_ms: int) -> bytes:
    start, end = STAGES[index]
    receiver = key_named(f"requester {number // REQUESTS_EACH}") if index + 1 == len(STAGES) else WORKERS[index + 1]
    receipt = m.ReceiptBody(
        request_id=f"request-{number:08}",
        session=session,
        epoch=0,
        sender=WORKERS[index].peer_id,
        positions=POSITIONS,
        digest=_digest(number, end, POSITIONS),
    )
    mark = m.DigestMark(
        positions=DIGEST_MARK_POSITIONS,
        input=_digest(number, start, DIGEST_MARK_POSITIONS),
        output=_digest(number, end, DIGEST_MARK_POSITIONS),
    )
    body = m.Proof(
        request_id=receipt.request_id,
        ticket=ticket,
        lease=lease,
        route=route,
        session=session,
        epoch=0,
        opened_at=now_ms,
        manifest_root=MODEL.manifest_root,
        recipe=RECIPE,
        layers=(start, end),
        positions=POSITIONS,
        input_digest=_digest(number, start, POSITIONS),
        output_digest=_digest(number, end, POSITIONS),
        marks=(mark,),
        receipt=seal(receiver, m.RECEIPT, receipt, sequence=number + 1, now_ms=now_ms, audience=WORKERS[index].peer_id),
        compute_us=100_000,
    )
    settle_ms = round((TICKET_OPEN_S + TICKET_SETTLE_S) * 1000)
    return seal(
        WORKERS[index], m.PROOF, body, sequence=number + 1, now_ms=now_ms, audience=KEY.peer_id, ttl_ms=settle_ms
    )
