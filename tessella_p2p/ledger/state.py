"""The ledger's state and how one change moves it.

    table      key                                            value
    accounts   account name                                   micro-credits and settled proofs (8 bytes each)
    tickets    ticket key                                     `tickets.TicketFacts`
    proofs     ticket key, session, epoch, worker             `tickets.ProofFacts`
    issued     day (8 bytes), payer                           micro-credits brought in by the tickets on its account that day
    expiry     settle_before (8 bytes), ticket key            a zero byte
    state      "horizon"                                      the latest settle_before whose facts were dropped
    reputation peer                                           `reputation.Reputation`
    blacklist  peer                                           [since (Unix milliseconds), reason]
    audits     audit id, "verdict" or "slash", peer           a zero byte
    cleared    ticket key, session, epoch, worker             a zero byte: an audit passed this proof

`LedgerState.apply` is the only code that writes, in the running ledger as in a replay.
"""

from __future__ import annotations

from dataclasses import astuple

from tessella_p2p.base.errors import LocalProtocolError
from tessella_p2p.base.ids import LayerRange, PeerId
from tessella_p2p.base.limits import MAX_EXPIRED_PER_CHANGE, MICRO_PER_LAYER_POSITION
from tessella_p2p.ledger.accounts import ISSUANCE, Accounts, Transfer
from tessella_p2p.ledger.changes import (
    BlacklistChanged,
    Change,
    ProofSettled,
    Slashed,
    TicketsExpired,
    VerdictReached,
)
from tessella_p2p.ledger.reputation import Reputation, judged, slashed
from tessella_p2p.ledger.tables import Tables, decode_row, encode_row
from tessella_p2p.ledger.tickets import (
    ProofFacts,
    TicketFacts,
    TicketKey,
    decode_proof,
    decode_ticket,
    encode_proof,
    encode_ticket,
    facts_of,
)

TABLE_NAMES = (
    "accounts",
    "tickets",
    "proofs",
    "issued",
    "expiry",
    "state",
    "reputation",
    "blacklist",
    "audits",
    "cleared",
)
DAY_MS = 24 * 3600 * 1000

_HORIZON = b"horizon"
_VERDICT, _SLASH = b"verdict", b"slash"
_PRESENT = b"\0"


class LedgerState:
    """The state in a set of tables. Reading is free of effects; `apply` writes."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self.accounts = Accounts(tables)
        self._last_row, self._last_ticket = b"", TicketFacts()

    def ticket(self, key: TicketKey) -> TicketFacts:
        """What is known of a ticket; nothing, for one without a settled proof."""
        row = self._tables.get("tickets", key.digest)
        if row is None:
            return TicketFacts()
        # What is decided on is applied next: the same row once more.
        if row != self._last_row:
            self._last_row, self._last_ticket = row, decode_ticket(row)
        return self._last_ticket

    def proof(self, key: TicketKey, session: bytes, epoch: int, worker: str) -> ProofFacts | None:
        """What is known of the settled proof of ``worker`` for (session, epoch)."""
        row = self._tables.get("proofs", _proof_key(key, session, epoch, worker))
        return None if row is None else decode_proof(row, worker)

    def issued(self, payer: str, day: int) -> int:
        """Micro-credits that the tickets on the account of ``payer`` brought into being on ``day`` (days since the Unix epoch, UTC)."""
        row = self._tables.get("issued", _issued_key(day, payer))
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

    def reputation(self, peer: str) -> Reputation:
        """How ``peer`` did, its score as of the last event; see `reputation.at_time`."""
        row = self._tables.get("reputation", peer.encode())
        return Reputation() if row is None else _reputation(row)

    def reputations(self, after: str, limit: int) -> list[tuple[PeerId, Reputation]]:
        """Up to ``limit`` peers that any event concerned, whose ids follow ``after``."""
        rows = self._tables.scan("reputation", after.encode() + (b"\0" if after else b""), limit)
        return [(PeerId(key.decode()), _reputation(row)) for key, row in rows]

    def blacklisted(self, peer: str) -> tuple[int, str] | None:
        """Since when (Unix milliseconds) and why ``peer`` is on the blacklist; None where it is not."""
        row = self._tables.get("blacklist", peer.encode())
        return None if row is None else _blacklisted(row)

    def blacklist(self, after: str, limit: int) -> list[tuple[PeerId, int, str]]:
        """Up to ``limit`` blacklisted peers whose ids follow ``after``: the peer, since when, why."""
        rows = self._tables.scan("blacklist", after.encode() + (b"\0" if after else b""), limit)
        return [(PeerId(key.decode()), *_blacklisted(row)) for key, row in rows]

    def has_verdict(self, audit_id: bytes, peer: str) -> bool:
        """Whether this audit came to a verdict on ``peer``."""
        return self._tables.get("audits", audit_id + _VERDICT + peer.encode()) is not None

    def has_slash(self, audit_id: bytes, peer: str) -> bool:
        """Whether ``peer`` was slashed for this audit."""
        return self._tables.get("audits", audit_id + _SLASH + peer.encode()) is not None

    def is_cleared(self, key: TicketKey, session: bytes, epoch: int, worker: str) -> bool:
        """Whether an audit has passed this proof."""
        return self._tables.get("cleared", _proof_key(key, session, epoch, worker)) is not None

    def apply(self, change: Change, at_ms: int) -> None:
        """Move the state by one change; the same changes at the same times in the same order give the same bytes.

        Args:
            change: what happened.
            at_ms: when its entry was written, Unix milliseconds.

        Raises:
            LocalProtocolError: a change that does not fit the state; it was never decided on this state.
        """
        if type(change) is ProofSettled:  # not isinstance, which takes long on messages
            self._apply_settled(change)
        elif isinstance(change, TicketsExpired):
            self._apply_expired(change)
        elif isinstance(change, Slashed):
            self._apply_slashed(change, at_ms)
        elif isinstance(change, VerdictReached):
            self._apply_verdict(change, at_ms)
        elif isinstance(change, BlacklistChanged):
            self._apply_blacklist(change, at_ms)
        # `ChainBegun` moves nothing: it only says why the chain is another one.

    def _apply_settled(self, change: ProofSettled) -> None:
        key = TicketKey(PeerId(change.requester), change.request_id)
        layers = LayerRange(*change.layers)
        ticket = self.ticket(key)
        before = self.proof(key, change.session, change.epoch, change.worker)
        amount = change.micro_credits
        if ticket.due(layers, change.paid_positions) * MICRO_PER_LAYER_POSITION != amount:
            raise LocalProtocolError(f"{amount} micro-credits are not what is due on {change.request_id}")
        entries = {**ticket.entries, change.worker: ticket.entries.get(change.worker, 0) + 1}
        settle_before = max(ticket.settle_before, change.settle_before)
        routes = ticket.routes
        if change.route is not None:
            routes = {(change.session, change.epoch): change.route, **routes}
        paid = ticket.with_paid(layers, change.paid_positions)
        self._put_ticket(key, TicketFacts(settle_before, paid, entries, routes), ticket)
        facts = facts_of(change, 0 if before is None else before.micro_credits)
        self._tables.put("proofs", _proof_key(key, change.session, change.epoch, change.worker), encode_proof(facts))
        self._pay(change, proofs=before is None)

    def _pay(self, change: ProofSettled, *, proofs: int) -> None:
        amount, payer = change.micro_credits, change.payer if change.requester_pays else ISSUANCE
        if not amount or payer == change.worker:  # the latter would take from one account what it gives to the same
            if proofs:
                self.accounts.count_proof(change.worker)
            return
        if change.requester_pays and self.accounts.get(payer).micro_credits < amount:
            raise LocalProtocolError(f"{payer} has less than the {amount} micro-credits that it is to pay")
        self.accounts.apply(Transfer(payer, change.worker, amount), proofs=proofs)
        if not change.requester_pays:
            issued = self.issued(change.payer, change.day) + amount
            self._tables.put("issued", _issued_key(change.day, change.payer), issued.to_bytes(8, "big"))

    def _apply_slashed(self, change: Slashed, at_ms: int) -> None:
        if change.audit_id is not None:
            if self.has_slash(change.audit_id, change.peer):
                raise LocalProtocolError(f"{change.peer} was slashed for this audit before")
            self._tables.put("audits", change.audit_id + _SLASH + change.peer.encode(), _PRESENT)
        if change.micro_credits:
            self.accounts.apply(Transfer(change.peer, ISSUANCE, change.micro_credits))
        self._put_reputation(change.peer, slashed(self.reputation(change.peer), at_ms))

    def _apply_verdict(self, change: VerdictReached, at_ms: int) -> None:
        if self.has_verdict(change.audit_id, change.peer):
            raise LocalProtocolError(f"this audit came to a verdict on {change.peer} before")
        self._tables.put("audits", change.audit_id + _VERDICT + change.peer.encode(), _PRESENT)
        self._put_reputation(change.peer, judged(self.reputation(change.peer), change.verdict, at_ms))
        named = change.requester is not None and change.request_id is not None
        if change.verdict == "passed" and named and change.session is not None and change.epoch is not None:
            key = TicketKey(PeerId(str(change.requester)), str(change.request_id))
            # A ticket without a settled proof is nobody's neighbour, and would never be forgotten.
            if self._tables.get("tickets", key.digest) is not None:
                self._tables.put("cleared", _proof_key(key, change.session, change.epoch, change.peer), _PRESENT)

    def _apply_blacklist(self, change: BlacklistChanged, at_ms: int) -> None:
        if change.blacklisted:
            self._tables.put("blacklist", change.peer.encode(), encode_row([at_ms, change.reason]))
        else:
            self._tables.delete("blacklist", change.peer.encode())

    def _put_reputation(self, peer: str, reputation: Reputation) -> None:
        self._tables.put("reputation", peer.encode(), encode_row(list(astuple(reputation))))

    def _put_ticket(self, key: TicketKey, after: TicketFacts, before: TicketFacts) -> None:
        if after.settle_before != before.settle_before:
            self._tables.delete("expiry", _expiry_key(before.settle_before, key.digest))
            self._tables.put("expiry", _expiry_key(after.settle_before, key.digest), _PRESENT)
        self._tables.put("tickets", key.digest, encode_ticket(after))

    def _apply_expired(self, change: TicketsExpired) -> None:
        for expiry, _ in self._tables.scan("expiry", b"", MAX_EXPIRED_PER_CHANGE):
            settle_before, digest = int.from_bytes(expiry[:8], "big"), expiry[8:]
            if settle_before > change.before:
                break
            self._tables.put("state", _HORIZON, max(self.horizon, settle_before).to_bytes(8, "big"))
            self._tables.delete("expiry", expiry)
            self._tables.delete("tickets", digest)
            self._delete_of_ticket("proofs", digest)
            self._delete_of_ticket("cleared", digest)
        # A day's bound holds a day longer: for proofs that came before midnight and wait, and for a clock that is set back over it.
        yesterday = change.before // DAY_MS - 1
        for key, _ in self._tables.scan("issued", b"", MAX_EXPIRED_PER_CHANGE):
            if int.from_bytes(key[:8], "big") >= yesterday:
                break
            self._tables.delete("issued", key)

    def _delete_of_ticket(self, table: str, digest: bytes) -> None:
        while rows := [row for row in self._tables.scan(table, digest, 64) if row[0].startswith(digest)]:
            for key, _ in rows:
                self._tables.delete(table, key)


def _proof_key(key: TicketKey, session: bytes, epoch: int, worker: str) -> bytes:
    return key.digest + session + epoch.to_bytes(4, "big") + worker.encode()


def _issued_key(day: int, payer: str) -> bytes:
    return day.to_bytes(8, "big") + payer.encode()


def _expiry_key(settle_before: int, digest: bytes) -> bytes:
    return settle_before.to_bytes(8, "big") + digest


def _number(row: bytes) -> int:
    if len(row) != 8:
        raise LocalProtocolError("a row that should hold a number is damaged")
    return int.from_bytes(row, "big")


def _reputation(row: bytes) -> Reputation:
    value = decode_row(row)
    if isinstance(value, list) and len(value) == 7 and all(isinstance(number, int) for number in value):
        return Reputation(*value)
    raise LocalProtocolError("the row of a reputation is damaged")


def _blacklisted(row: bytes) -> tuple[int, str]:
    match decode_row(row):
        case [int(since), str(reason)]:
            return since, reason
    raise LocalProtocolError("a row of the blacklist is damaged")
