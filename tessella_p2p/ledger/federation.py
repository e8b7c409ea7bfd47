"""Another orchestrator's ledger, followed entry by entry and believed in nothing that can be checked (pure).

    page ──▶ each entry: signature ─▶ place in the chain ─▶ proof, ticket, lease, receipt ─▶ amount, on the mirrored state ──▶ counted
                 │                          │                          │                            │
                 └ InvalidSignature         └ equivocation             └ forged entry               └ forged entry

What was told is a `Deceived` with the issuer's own signed statements as evidence: anybody can verify them, so they convict nobody else.
A page is taken as a whole or not at all.

    table       key                   value
    links       sequence (8 bytes)    hash of the entry in its chain, SHA-256 of its bytes, 1 where it was proven
    sealed      sequence (8 bytes)    the newest `MAX_KEPT_ENTRIES` entries, as their orchestrator sealed them
    unproven    account               micro-credits of entries that came without their proof
    mirror      "cursor", …           how far it was followed; the newest head that was seen; those of others that wait to be compared

and, beside these, the tables of `LedgerState`, on which every entry is applied as on the ledger that it comes from.

What is believed, and what is not:

- A settled entry counts where its proof comes with it: the worker's signature, the issuer's ticket, the lease, the receipt, and on the
  mirrored state what was due. One without (its ticket settles no more, and the issuer dropped the proof) keeps its place in the
  chain and counts for nothing, unless it was proven in an earlier chain of the same orchestrator.
- Slashes, verdicts and the blacklist are its own judgements; they only ever lower what counts here.
- It may still name workers and requesters that it made up, and mint tickets for them. Therefore what it says of anybody counts up to a
  trust limit, and what somebody owes there is not owed here.
- Whose lease a worker had is not asked: the issuer could have signed it itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Literal

from tessella_p2p.base.errors import LocalProtocolError, MalformedMessage, RemoteProtocolError, VersionMismatch
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import KIB, MAX_KEPT_ENTRIES, MAX_KEPT_RUMOURS, MAX_LEDGER_ENTRY_BYTES, MAX_REASON_CHARS
from tessella_p2p.ledger.chain import HASH_BYTES, START, Head, entry_hash
from tessella_p2p.ledger.changes import ChainBegun, JournalEntry, ProofSettled, TicketsExpired, decode_entry
from tessella_p2p.ledger.evidence import ProofRefused, ProvenWork, SettlementTerms, verify_proof
from tessella_p2p.ledger.state import TABLE_NAMES as STATE_TABLES
from tessella_p2p.ledger.state import LedgerState
from tessella_p2p.ledger.tables import Tables, decode_row, encode_row
from tessella_p2p.wire import cbor
from tessella_p2p.wire.envelope import Envelope, open_envelope
from tessella_p2p.wire.messages import LEDGER_ENTRY, LEDGER_HEAD, LedgerEntry, LedgerHead

TABLE_NAMES = ("links", "sealed", "unproven", "mirror", *STATE_TABLES)

_CURSOR, _HEAD, _RUMOUR = b"cursor", b"head", b"rumour"
_DIGEST_BYTES = 32
_MAX_EVIDENCE_BYTES = 2 * MAX_LEDGER_ENTRY_BYTES + 8 * KIB

Kind = Literal["equivocation", "forged_entry"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What convicts an orchestrator. ``statements`` are its own sealed entries and heads; the last one is the offending one.

    equivocation: two statements of one journal that cannot both be true. forged_entry: an entry that does not follow from its proof
    and the entries before it.
    """

    kind: Kind
    issuer: PeerId
    chain: int
    sequence: int
    reason: str
    statements: tuple[bytes, ...]


class Deceived(RemoteProtocolError):
    """An orchestrator signed what is not true. It is followed no further; ``evidence`` says why."""

    code = "federation_deceit"

    def __init__(self, evidence: Evidence) -> None:
        super().__init__(f"{evidence.kind} at entry {evidence.sequence} of chain {evidence.chain}: {evidence.reason}")
        self.evidence = evidence
        self.blame(evidence.issuer)


def encode_evidence(evidence: Evidence) -> bytes:
    """The bytes of a file of evidence: canonical CBOR of a list, in the order of the fields."""
    return cbor.encode([*astuple(evidence)[:-1], list(evidence.statements)])


def decode_evidence(data: bytes) -> Evidence:
    """What a file of evidence holds.

    Raises:
        MalformedMessage: damaged.
    """
    match cbor.decode(data, _MAX_EVIDENCE_BYTES):
        case [
            "equivocation" | "forged_entry" as kind,
            str(issuer),
            int(chain),
            int(sequence),
            str(reason),
            list(statements),
        ]:
            if all(isinstance(statement, bytes) for statement in statements):
                return Evidence(kind, PeerId(issuer), chain, sequence, reason, tuple(statements))
    raise MalformedMessage("no file of evidence")


@dataclass(frozen=True, slots=True)
class Link:
    """What is remembered of one entry: its hash in the chain, the SHA-256 of its bytes, and whether it was proven."""

    hash: bytes
    digest: bytes
    proven: bool


def open_head(raw: bytes, issuer: PeerId | None = None) -> tuple[Envelope, LedgerHead]:
    """A sealed head. Its time is not judged: it is a statement of when it was made.

    Raises:
        RemoteProtocolError: it is none, or not ``issuer``'s.
    """
    envelope = open_envelope(raw, LEDGER_HEAD, now_ms=None, signer=issuer)
    return envelope, envelope.message(LedgerHead)


def _always_unknown(_sequence: int, _digest: bytes) -> bool:
    return False


class MirroredLedger:
    """One chain of one orchestrator, as far as it was followed.

    Args:
        tables: where it is kept: `TABLE_NAMES`. What a call writes counts only where the call returns; undo it where it raises.
        issuer: whose ledger it is.
        chain: which of its chains.
    """

    def __init__(self, tables: Tables, issuer: PeerId, chain: int) -> None:
        self._tables = tables
        self._issuer = issuer
        self._chain = chain
        self._state = LedgerState(tables)

    # ---- What is known ----

    @property
    def cursor(self) -> Head:
        """The last entry that was taken."""
        match self._get(_CURSOR):
            case None:
                return Head(self._chain, 0, START)
            case [int(sequence), bytes(hash_)]:
                return Head(self._chain, sequence, hash_)
        raise LocalProtocolError("the cursor of a mirrored ledger is damaged")

    def signed_head(self) -> bytes | None:
        """The newest sealed head that the issuer showed here."""
        return self._tables.get("mirror", _HEAD)

    def link(self, sequence: int) -> Link | None:
        """What is remembered of an entry; None for one that was not taken."""
        row = self._tables.get("links", _place(sequence))
        if row is None:
            return None
        if len(row) != HASH_BYTES + _DIGEST_BYTES + 1:
            raise LocalProtocolError("the row of a mirrored entry is damaged")
        return Link(row[:HASH_BYTES], row[HASH_BYTES:-1], row[-1] == 1)

    def counted(self, peer: PeerId) -> int:
        """Micro-credits that ``peer`` has there and that were proven here; at least 0."""
        return max(0, self._state.accounts.get(peer).micro_credits - self._unproven(peer))

    # ---- What is told ----

    def take(
        self,
        entries: Sequence[bytes],
        signed_head: bytes,
        total_layers: Mapping[bytes, int],
        proven_before: Callable[[int, bytes], bool] = _always_unknown,
    ) -> Head:
        """Take one page.

        Args:
            entries: sealed, from the cursor on, in order.
            signed_head: the sealed head that came with them.
            total_layers: layers of the models that are known here, by manifest root.
            proven_before: whether an earlier chain had an entry with this sequence and these bytes (their SHA-256), proven.

        Returns:
            The head that the issuer signed; of another, later chain where it was restored, and then nothing was taken.

        Raises:
            Deceived: the issuer contradicts itself, or signed what does not follow.
            VersionMismatch: an entry that this program cannot read.
            RemoteProtocolError: what came is no answer to what was asked: somebody else's, out of order, or older than what is known.
        """
        envelope, body = open_head(signed_head, self._issuer)
        head = Head(body.chain, body.sequence, body.hash)
        before = self._newest()
        if before is not None and envelope.issued_at < before.issued_at:
            raise RemoteProtocolError("a head that is older than one that was shown before").blame(self._issuer)
        if head.chain > self._chain:
            return head
        if head.chain < self._chain:
            told = () if before is None else (before.raw,)
            raise self._deceived("equivocation", head.sequence, "it went back to an earlier chain", *told, signed_head)
        for raw in entries:
            self._take_entry(raw, total_layers, proven_before)
        self._check_head(signed_head, head, must_reach=True)
        self._tables.put("mirror", _HEAD, signed_head)
        self._check_rumours()
        return head

    def hear(self, signed_head: bytes) -> None:
        """Compare with a head that the issuer showed to somebody else; one that is ahead of the cursor is compared once that is there.

        Of the heads that are ahead the `MAX_KEPT_RUMOURS` nearest ones are kept: a fork's later heads do not push out its first one,
        and heads that are never reached do not push out those that will be.

        Raises:
            Deceived: the issuer told others another story.
            RemoteProtocolError: it is no head of the issuer.
        """
        _, body = open_head(signed_head, self._issuer)
        if body.chain != self._chain:
            return
        if body.sequence <= self.cursor.sequence:
            self._check_head(signed_head, Head(body.chain, body.sequence, body.hash), must_reach=False)
            return
        key = _RUMOUR + _place(body.sequence)
        before = self._tables.get("mirror", key)
        if before is None:
            self._tables.put("mirror", key, signed_head)
            rumours = self._rumours()
            if len(rumours) > MAX_KEPT_RUMOURS:
                self._tables.delete("mirror", rumours[-1][0])
        elif open_head(before, self._issuer)[1].hash != body.hash:
            reason = "two heads that differ at one and the same entry"
            raise self._deceived("equivocation", body.sequence, reason, before, signed_head)

    def _check_rumours(self) -> None:
        """Compare what was heard with what is known by now."""
        reached = _RUMOUR + _place(self.cursor.sequence)
        for key, head in self._rumours():
            if key <= reached:
                self.hear(head)
                self._tables.delete("mirror", key)

    def _rumours(self) -> list[tuple[bytes, bytes]]:
        """The heads that wait to be compared, the nearest first."""
        rows = self._tables.scan("mirror", _RUMOUR, MAX_KEPT_RUMOURS + 1)
        return [(key, head) for key, head in rows if key.startswith(_RUMOUR)]

    # ---- One entry ----

    def _take_entry(
        self, raw: bytes, total_layers: Mapping[bytes, int], proven_before: Callable[[int, bytes], bool]
    ) -> None:
        cursor = self.cursor
        body = open_envelope(raw, LEDGER_ENTRY, now_ms=None, signer=self._issuer).message(LedgerEntry)
        sequence = body.sequence
        if (body.chain, sequence) != (self._chain, cursor.sequence + 1):
            raise RemoteProtocolError(
                f"entry {sequence} of chain {body.chain} where {cursor.sequence + 1} of {self._chain} was asked for"
            ).blame(self._issuer)
        if body.previous != cursor.hash:
            before = self._tables.get("sealed", _place(cursor.sequence))
            told = () if before is None else (before,)
            raise self._deceived("equivocation", sequence, "it does not follow the entry before it", *told, raw)
        entry = self._decoded(body.entry, sequence)
        digest = hashlib.sha256(body.entry).digest()
        try:
            proven = self._verified(entry, body.proof, total_layers) or proven_before(sequence, digest)
            self._state.apply(entry.change, entry.at)
        except (
            ProofRefused,
            RemoteProtocolError,
            LocalProtocolError,
        ) as error:  # the last: a change that does not fit the state
            raise self._deceived("forged_entry", sequence, str(error), raw) from error
        if isinstance(entry.change, ProofSettled) and not proven:
            self._note_unproven(entry.change)
        hash_ = entry_hash(cursor.hash, self._chain, sequence, body.entry)
        self._tables.put("links", _place(sequence), hash_ + digest + bytes([proven]))
        self._tables.put("sealed", _place(sequence), raw)
        self._tables.delete("sealed", _place(max(0, sequence - MAX_KEPT_ENTRIES)))
        self._tables.put("mirror", _CURSOR, encode_row([sequence, hash_]))

    def _decoded(self, entry: bytes, sequence: int) -> JournalEntry:
        try:
            return decode_entry(entry)
        except MalformedMessage as error:
            # It may as well be of a newer version: no deceit, but nothing behind it can be judged either.
            raise VersionMismatch(
                f"entry {sequence} cannot be read ({error}): update this program, if the other is newer"
            ).blame(self._issuer) from error

    def _verified(self, entry: JournalEntry, sealed_proof: bytes | None, total_layers: Mapping[bytes, int]) -> bool:
        """Whether an entry says what its proof says; False without a proof. Raises what is wrong with it."""
        change = entry.change
        if isinstance(change, TicketsExpired) and change.before > entry.at:
            raise RemoteProtocolError("it forgets tickets that could still be settled when it was written")
        if (
            isinstance(change, ChainBegun) and change.chain > self._chain
        ):  # of earlier restores the journal keeps the entries
            raise RemoteProtocolError(f"it begins chain {change.chain} within chain {self._chain}")
        if not isinstance(change, ProofSettled):
            if sealed_proof is not None:
                raise RemoteProtocolError("a proof beside an entry that settles none")
            return True
        if change.settle_before <= self._state.horizon:
            raise RemoteProtocolError("it pays for a ticket that is forgotten")
        if sealed_proof is None:
            return False
        terms = SettlementTerms(self._issuer, total_layers, lease_issuers=None)
        _check_settled(change, verify_proof(sealed_proof, terms, entry.at))
        return True

    # ---- Statements against statements ----

    def _newest(self) -> Envelope | None:
        """The newest head that the issuer showed here."""
        raw = self.signed_head()
        return None if raw is None else open_head(raw, self._issuer)[0]

    def _check_head(self, raw: bytes, head: Head, *, must_reach: bool) -> None:
        """Compare a head with the chain. ``must_reach``: it was made after what is known, so it may not end before that."""
        cursor = self.cursor
        if must_reach and head.sequence < cursor.sequence:
            raise self._deceived(
                "equivocation",
                head.sequence,
                f"it ends before entry {cursor.sequence}",
                *self._told(cursor.sequence),
                raw,
            )
        if head.sequence > cursor.sequence:
            return
        link = self.link(head.sequence)
        known = START if link is None else link.hash
        if head.hash != known:
            reason = "two journals that differ up to this entry"
            raise self._deceived("equivocation", head.sequence, reason, *self._told(head.sequence), raw)

    def _told(self, sequence: int) -> tuple[bytes, ...]:
        """What the issuer signed that fixes the hash at ``sequence``: that entry, or else what else there is."""
        raw = self._tables.get("sealed", _place(sequence)) or self.signed_head()
        return () if raw is None else (raw,)

    def _deceived(self, kind: Kind, sequence: int, reason: str, *statements: bytes) -> Deceived:
        evidence = Evidence(
            kind=kind,
            issuer=self._issuer,
            chain=self._chain,
            sequence=sequence,
            reason=reason[:MAX_REASON_CHARS],
            statements=statements,
        )
        return Deceived(evidence)

    # ---- Rows ----

    def _get(self, key: bytes) -> object:
        row = self._tables.get("mirror", key)
        return None if row is None else decode_row(row)

    def _unproven(self, account: str) -> int:
        row = self._tables.get("unproven", account.encode())
        value = 0 if row is None else decode_row(row)
        if not isinstance(value, int):
            raise LocalProtocolError("a row of what was not proven is damaged")
        return value

    def _note_unproven(self, change: ProofSettled) -> None:
        if change.micro_credits:
            total = self._unproven(change.worker) + change.micro_credits
            self._tables.put("unproven", change.worker.encode(), encode_row(total))


def _check_settled(change: ProofSettled, work: ProvenWork) -> None:
    """Whether a settled entry is about the proof that comes with it, and pays no more positions than were receipted."""
    proof = work.proof
    said = (
        change.worker,
        change.requester,
        change.identity,
        change.request_id,
        change.settle_before,
        change.session,
        change.epoch,
    )
    proven = (
        work.worker,
        work.ticket.requester,
        work.ticket.identity,
        proof.request_id,
        work.ticket.settle_before,
        proof.session,
        proof.epoch,
    )
    done = (change.layers, change.payload_digest, change.upstream, change.downstream, change.route, change.points)
    shown = (work.layers.as_tuple(), work.payload_digest, work.upstream, work.downstream, work.route, work.points)
    if (said, done) != (proven, shown):
        raise RemoteProtocolError("it says something else than the proof that it rests on")
    if change.paid_positions > work.receipted or change.complete != (change.paid_positions == work.receipted):
        raise RemoteProtocolError(
            f"it counts {change.paid_positions} positions as paid, of which the receipt covers {work.receipted}"
        )


def _place(sequence: int) -> bytes:
    return sequence.to_bytes(8, "big")
