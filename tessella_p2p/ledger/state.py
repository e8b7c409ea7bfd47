"""The ledger's state and how one change moves it.

    table      key                                            value
    accounts   account name                                   [micro-credits, settled proofs]
    tickets    ticket key                                     settle_before, paid positions by layer, proofs by worker
    proofs     ticket key, session, epoch, worker             the last change about the proof, amounts summed
    issued     day (8 bytes), requester                       micro-credits paid on the requester's tickets that day
    expiry     settle_before (8 bytes), ticket key            empty
    state      "horizon"                                      the latest settle_before whose facts were dropped

A ticket's key is the SHA-256 of its requester and request id, so two tickets for one request are paid as one. A stage proves
positions from 0, so what a layer was paid for is a prefix: one number per layer.

`LedgerState.apply` is the only code that writes, in the running ledger as in a replay.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from tessella_p2p.base.errors import LocalProtocolError
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import MAX_EXPIRED_PER_CHANGE, MICRO_PER_LAYER_POSITION
from tessella_p2p.ledger.accounts import ISSUANCE, Accounts, Transfer
from tessella_p2p.ledger.changes import Change, ProofSettled, TicketsExpired
from tessella_p2p.ledger.tables import Tables, decode_row, encode_row
from tessella_p2p.wire.envelope import decode_message, encode_message

TABLE_NAMES = ("accounts", "tickets", "proofs", "issued", "expiry", "state")
DAY_MS = 24 * 3600 * 1000

_HORIZON = b"horizon"


@dataclass(frozen=True, slots=True)
class TicketKey:
    """What a ticket is known by: one requester's one request."""

    requester: PeerId
    request_id: str

    @property
    def digest(self) -> bytes:
        """32 bytes that stand for it in table keys."""
        return hashlib.sha256(f"{self.requester}\0{self.request_id}".encode()).digest()


@dataclass(frozen=True, slots=True)
class TicketFacts:
    """What is known of a ticket: up to which position each layer was paid, and how many proofs each worker has."""

    settle_before: int = 0
    paid: Mapping[int, int] = field(default_factory=dict)
    proofs: Mapping[str, int] = field(default_factory=dict)

    def due(self, layers: LayerRange, positions: int) -> int:
        """Layer·positions of ``layers`` below ``positions`` that were not paid yet."""
        return sum(max(0, positions - self.paid.get(layer, 0)) for layer in layers)


class LedgerState:
    """The state in a set of tables. Reading is free of effects; `apply` writes."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self.accounts = Accounts(tables)

    def ticket(self, key: TicketKey) -> TicketFacts:
        """What is known of a ticket; nothing, for one without a settled proof."""
        row = self._tables.get("tickets", key.digest)
        if row is None:
            return TicketFacts()
        match decode_row(row):
            case [int(settle_before), list(paid), dict(proofs)]:
                return TicketFacts(settle_before, dict(paid), proofs)
        raise LocalProtocolError("the row of a ticket is damaged")

    def proof(self, key: TicketKey, session: bytes, epoch: int, worker: str) -> ProofSettled | None:
        """The settled proof of ``worker`` for (session, epoch), with the sum of what it was paid."""
        row = self._tables.get("proofs", _proof_key(key, session, epoch, worker))
        return None if row is None else decode_message(ProofSettled, row)

    def issued(self, requester: str, day: int) -> int:
        """Micro-credits that the tickets of ``requester`` brought into being on ``day`` (days since the Unix epoch, UTC)."""
        row = self._tables.get("issued", _issued_key(day, requester))
        return 0 if row is None else _number(row)

    @property
    def horizon(self) -> int:
        """Tickets that were to settle before this time (Unix milliseconds) are forgotten: nothing more is paid on them."""
        row = self._tables.get("state", _HORIZON)
        return 0 if row is None else _number(row)

    def next_expiry(self) -> int | None:
        """The settle_before of the ticket that may be forgotten next."""
        rows = self._tables.scan("expiry", b"", 1)
        return int.from_bytes(rows[0][0][:8], "big") if rows else None

    def apply(self, change: Change) -> None:
        """Move the state by one change; the same changes in the same order give the same bytes.

        Raises:
            LocalProtocolError: a change that does not fit the state; it was never decided on this state.
        """
        if isinstance(change, ProofSettled):
            self._apply_settled(change)
        else:
            self._apply_expired(change)

    def _apply_settled(self, change: ProofSettled) -> None:
        key = TicketKey(PeerId(change.requester), change.request_id)
        layers = LayerRange(*change.layers)
        ticket = self.ticket(key)
        before = self.proof(key, change.session, change.epoch, change.worker)
        if ticket.due(layers, change.paid_positions) * MICRO_PER_LAYER_POSITION != change.micro_credits:
            raise LocalProtocolError(f"{change.micro_credits} micro-credits are not what is due on {change.request_id}")
        paid = dict(ticket.paid)
        for layer in layers:
            paid[layer] = max(paid.get(layer, 0), change.paid_positions)
        proofs = dict(ticket.proofs)
        if before is None:
            proofs[change.worker] = proofs.get(change.worker, 0) + 1
            self.accounts.count_proof(change.worker)
        else:
            change = change.model_copy(update={"micro_credits": before.micro_credits + change.micro_credits})
        self._put_ticket(key, TicketFacts(max(ticket.settle_before, change.settle_before), paid, proofs), ticket)
        self._tables.put("proofs", _proof_key(key, change.session, change.epoch, change.worker), encode_message(change))
        amount = change.micro_credits - (0 if before is None else before.micro_credits)
        if amount:
            self.accounts.apply(Transfer(ISSUANCE, change.worker, amount))
            issued = self.issued(change.requester, change.day) + amount
            self._tables.put("issued", _issued_key(change.day, change.requester), encode_row(issued))

    def _put_ticket(self, key: TicketKey, after: TicketFacts, before: TicketFacts) -> None:
        if after.settle_before != before.settle_before:
            self._tables.delete("expiry", _expiry_key(before.settle_before, key.digest))
            self._tables.put("expiry", _expiry_key(after.settle_before, key.digest), b"\0")
        row: list[object] = [
            after.settle_before,
            [list(pair) for pair in sorted(after.paid.items())],
            dict(after.proofs),
        ]
        self._tables.put("tickets", key.digest, encode_row(row))

    def _apply_expired(self, change: TicketsExpired) -> None:
        for expiry, _ in self._tables.scan("expiry", b"", MAX_EXPIRED_PER_CHANGE):
            settle_before, digest = int.from_bytes(expiry[:8], "big"), expiry[8:]
            if settle_before > change.before:
                break
            self._tables.put("state", _HORIZON, encode_row(max(self.horizon, settle_before)))
            self._tables.delete("expiry", expiry)
            self._tables.delete("tickets", digest)
            self._delete_proofs(digest)
        today = change.before // DAY_MS
        for key, _ in self._tables.scan("issued", b"", MAX_EXPIRED_PER_CHANGE):
            if int.from_bytes(key[:8], "big") >= today:
                break
            self._tables.delete("issued", key)

    def _delete_proofs(self, digest: bytes) -> None:
        while rows := [row for row in self._tables.scan("proofs", digest, 64) if row[0].startswith(digest)]:
            for key, _ in rows:
                self._tables.delete("proofs", key)


def _proof_key(key: TicketKey, session: bytes, epoch: int, worker: str) -> bytes:
    return key.digest + session + epoch.to_bytes(4, "big") + worker.encode()


def _issued_key(day: int, requester: str) -> bytes:
    return day.to_bytes(8, "big") + requester.encode()


def _expiry_key(settle_before: int, digest: bytes) -> bytes:
    return settle_before.to_bytes(8, "big") + digest


def _number(row: bytes) -> int:
    value = decode_row(row)
    if not isinstance(value, int):
        raise LocalProtocolError("a row that should hold a number is damaged")
    return value
