"""What the ledger knows of one ticket and of one settled proof, and the rows that hold it (pure).

A ticket is known by its requester and request id, so two tickets for one request are paid as one. A stage proves positions from 0, so
what a layer was paid for is a prefix; and a stage proves whole layers, so neighbouring layers mostly have the same one: a ticket's row
has one run of layers for each stage, not one number for each layer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from tessella_p2p.base.errors import LocalProtocolError
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.ledger.changes import ProofSettled
from tessella_p2p.ledger.tables import decode_row, encode_row

Run = tuple[int, int, int]
"""Layers ``[start, end)`` that were paid up to one position, which is over 0."""
Point = tuple[int, bytes, bytes]
"""A position, and the digests of input and output up to it."""


@dataclass(frozen=True, slots=True)
class TicketKey:
    """What a ticket is known by: one requester's one request. ``digest`` are 32 bytes that stand for it in table keys."""

    requester: PeerId
    request_id: str
    digest: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha256(f"{self.requester}\0{self.request_id}".encode()).digest()
        object.__setattr__(self, "digest", digest)


@dataclass(frozen=True, slots=True)
class TicketFacts:
    """What is known of a ticket: what each layer was paid for, and how many entries of the journal each worker's proofs made.

    ``paid`` is in the order of the layers, without overlaps; ``routes`` the digest of each (session, epoch)'s route statement, of which
    the first one that a settled proof carried counts.
    """

    settle_before: int = 0
    paid: tuple[Run, ...] = ()
    entries: Mapping[str, int] = field(default_factory=dict)
    routes: Mapping[tuple[bytes, int], bytes] = field(default_factory=dict)

    def due(self, layers: LayerRange, positions: int) -> int:
        """Layer·positions of ``layers`` below ``positions`` that were not paid yet."""
        due = len(layers) * positions
        for start, end, paid in self.paid:
            shared = min(end, layers.end) - max(start, layers.start)
            if shared > 0:
                due -= shared * min(paid, positions)
        return due

    def with_paid(self, layers: LayerRange, positions: int) -> tuple[Run, ...]:
        """``paid`` once ``layers`` are paid up to ``positions`` at least."""
        edges = {layers.start, layers.end}.union(*((start, end) for start, end, _ in self.paid))
        runs: list[Run] = []
        ascending = sorted(edges)
        for start, end in pairwise(ascending):
            paid = next((paid for first, last, paid in self.paid if first <= start < last), 0)
            if layers.start <= start < layers.end:
                paid = max(paid, positions)
            if runs and runs[-1][1] == start and runs[-1][2] == paid:
                runs[-1] = (runs[-1][0], end, paid)
            elif paid:
                runs.append((start, end, paid))
        return tuple(runs)


@dataclass(frozen=True, slots=True)
class ProofFacts:
    """What is known of a settled proof: the last thing that was said, and what it brought in all.

    ``route`` is the digest of its route statement; empty where none was asked for yet.
    """

    worker: str
    payload_digest: bytes
    layers: tuple[int, int]
    route: bytes
    micro_credits: int
    complete: bool
    points: tuple[Point, ...]


def facts_of(change: ProofSettled, earlier: int) -> ProofFacts:
    """What is known once ``change`` is applied, of a proof that had brought ``earlier`` micro-credits before."""
    return ProofFacts(
        change.worker,
        change.payload_digest,
        change.layers,
        change.route or b"",
        earlier + change.micro_credits,
        change.complete,
        tuple((point.positions, point.input, point.output) for point in change.points),
    )


def encode_ticket(ticket: TicketFacts) -> bytes:
    """The bytes of a ticket's row."""
    routes = [(*key, route) for key, route in sorted(ticket.routes.items())]
    return encode_row([ticket.settle_before, ticket.paid, sorted(ticket.entries.items()), routes])


def decode_ticket(row: bytes) -> TicketFacts:
    """The ticket in ``row``."""
    match decode_row(row):
        case [int(settle_before), list(paid), list(entries), list(routes)]:
            by_epoch = {(session, epoch): route for session, epoch, route in routes}
            return TicketFacts(settle_before, tuple(map(tuple, paid)), dict(entries), by_epoch)
    raise LocalProtocolError("the row of a ticket is damaged")


def encode_proof(proof: ProofFacts) -> bytes:
    """The bytes of a proof's row; its worker is in the key."""
    return encode_row(
        [
            proof.payload_digest,
            proof.layers,
            proof.route,
            proof.micro_credits,
            proof.complete,
            proof.points,
        ]
    )


def decode_proof(row: bytes, worker: str) -> ProofFacts:
    """The proof of ``worker`` in ``row``."""
    match decode_row(row):
        case [
            bytes(payload_digest),
            [int(start), int(end)],
            bytes(route),
            int(micro_credits),
            bool(complete),
            list(points),
        ]:
            return ProofFacts(
                worker,
                payload_digest,
                (start, end),
                route,
                micro_credits,
                complete,
                tuple(map(tuple, points)),
            )
    raise LocalProtocolError("the row of a proof is damaged")
