"""The ledger on disk: an append-only journal and the state that follows from it, in one LMDB folder.

A change, its effect on the state and nothing else are one transaction, durable before its answer is given: a process that dies at any
point leaves the journal and the state of the same moment. So opening takes constant time, and `replay` only proves what is there.

Beside the ledger it keeps what else an orchestrator may not forget: its workers' assignments, the models that were published, and the
floors of serials and sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from tessella_p2p.base.errors import LocalProtocolError, MalformedMessage, StorageError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import (
    LEDGER_MAP_BYTES,
    MAX_MEMBERS,
    MAX_PAGE_ROWS,
    MAX_PROOFS_PER_BATCH,
    MAX_REVOCATIONS,
    MAX_SERVED_MODELS,
    MAX_SETTLED_TOGETHER,
    RESTORED_SEQUENCES,
    RESTORED_SERIALS,
    SETTLED_BYTES_PER_WORKER_DAY,
)
from tessella_p2p.ledger.accounts import Account
from tessella_p2p.ledger.assignments import Assignment, decode_assignment, encode_assignment
from tessella_p2p.ledger.audit_evidence import (
    AUDIT_TABLES,
    AuditEvidence,
    OpenAudit,
    drop_old_evidence,
    drop_open,
    has_old_evidence,
    keep_evidence,
    keep_open,
    read_evidence,
    read_open,
)
from tessella_p2p.ledger.chain import Head, SnapshotRow
from tessella_p2p.ledger.changes import BlacklistChanged, JournalEntry, Slashed, VerdictReached, encode_entry
from tessella_p2p.ledger.day_bytes import DAY_BYTES, add_day_bytes, drop_old_days, has_old_days, read_day_bytes
from tessella_p2p.ledger.environment import Environment, Transaction
from tessella_p2p.ledger.evidence import ProofRefused, ProvenWork, SettlementTerms
from tessella_p2p.ledger.group_commit import GroupCommit
from tessella_p2p.ledger.journal import (
    JOURNAL_TABLES,
    Journal,
    begin_chain,
    drop_old_proofs,
    has_old_proof,
    read_entries,
    read_head,
    read_newest,
    read_proof,
    read_snapshot,
    rewrite_state,
)
from tessella_p2p.ledger.new_folder import new_folder
from tessella_p2p.ledger.reputation import Reputation, at_time
from tessella_p2p.ledger.revocation import Revocation, decode_revocation, encode_revocation
from tessella_p2p.ledger.settlement import expire, refusal, settle, too_many_bytes
from tessella_p2p.ledger.state import TABLE_NAMES, LedgerState
from tessella_p2p.ledger.tables import DictTables
from tessella_p2p.ledger.verifiers import VerifyProofs, verify_in_place
from tessella_p2p.wire.messages import Settled

SCHEMA = 4
"""2 added the assignments; 3 the hash chain, and rows of the state that are read faster; 4 the routes of tickets and proofs."""
_OLDEST_SCHEMA = 1
_HASHED_SCHEMA = 3
_MODELS = "models"
_ASSIGNMENTS = "assignments"
_REVOCATIONS = "revocations"
_SERIAL_FLOOR = "lease_serial_floor"
_SEQUENCE_FLOOR = "sequence_floor"
_PAGE = 1024


@dataclass(frozen=True, slots=True)
class Judged:
    """The answer for one proof.

    Attributes:
        settled: the answer.
        worker: who signed the proof, where that is known.
        sequence: the entry that the answer rests on, where the proof moved something.
        work: what a proof showed that was not refused by itself.
    """

    settled: Settled
    worker: PeerId | None
    sequence: int | None = None
    work: ProvenWork | None = None


@dataclass(frozen=True, slots=True)
class Recorded:
    """A verdict that was written down: its entry, and whether its evidence is kept."""

    sequence: int
    evidence_kept: bool


@dataclass(frozen=True, slots=True)
class _Request:
    """Proofs that one caller wants settled: the work that each shows, or the answer that needs no state."""

    works: Sequence[tuple[bytes, ProvenWork | Judged]]
    terms: SettlementTerms
    now_ms: int


class LedgerStore:
    """The one writer of a ledger. Methods block; each may be called from any thread.

    Args:
        path: the folder; see `Environment`.
        map_size_bytes: the size to which the file may grow.
        sync: see `Environment`.
        verify: verifies proofs that come together; `ProofVerifiers` does so in other processes.

    Raises:
        StorageError: here and in every method, when the folder is in use, full or unwritable.
    """

    def __init__(
        self,
        path: Path,
        map_size_bytes: int = LEDGER_MAP_BYTES,
        *,
        sync: bool = True,
        verify: VerifyProofs = verify_in_place,
    ) -> None:
        self._environment = Environment(
            path,
            (*JOURNAL_TABLES, *AUDIT_TABLES, DAY_BYTES, _ASSIGNMENTS, _REVOCATIONS, _MODELS, *TABLE_NAMES),
            map_size_bytes=map_size_bytes,
            schema=SCHEMA,
            since=_OLDEST_SCHEMA,
            migrate=_migrate,
            sync=sync,
        )
        self._verify = verify
        self._settling = GroupCommit(self._settle_together, MAX_SETTLED_TOGETHER // MAX_PROOFS_PER_BATCH)

    def backup(self, target: Path) -> None:
        """Copy the ledger as it is now to the new folder ``target``; others read and write meanwhile.

        Raises:
            StorageError: ``target`` exists or cannot be written; then nothing is left of it.
        """
        with new_folder(target) as unfinished:
            self._environment.copy(unfinished)

    def begin_chain(self, now_ms: int) -> Head:
        """Go on as a ledger that was restored from a backup; see ``backup``. Durable when it returns.

        Raises:
            StorageError: also when the journal's hash chain is broken.
        """
        with self._environment.write() as transaction:
            head = begin_chain(transaction, now_ms)
            _raise_number(transaction, _SERIAL_FLOOR, (transaction.number(_SERIAL_FLOOR) or 0) + RESTORED_SERIALS)
            sequences = max(transaction.number(_SEQUENCE_FLOOR) or 0, now_ms * 1000) + RESTORED_SEQUENCES
            _raise_number(transaction, _SEQUENCE_FLOOR, sequences)
        return head

    def close(self) -> None:
        """Close the database."""
        self._environment.close()

    # ---- Proofs ----

    def settle(self, proofs: Sequence[bytes], terms: SettlementTerms, now_ms: int) -> list[Judged]:
        """Judge sealed proofs, in order, in one transaction; durable when it returns.

        Callers that come while another one's transaction is written share the next one.
        """
        verified = [_refused_or_shown(one) for one in self._verify(proofs, terms, now_ms)]
        works = list(zip(proofs, verified, strict=True))
        if not any(isinstance(work, ProvenWork) for _, work in works):
            return [work for _, work in works if isinstance(work, Judged)]
        return self._settling.submit(_Request(works, terms, now_ms))

    def _settle_together(self, requests: Sequence[_Request]) -> list[list[Judged]]:
        with self._environment.write() as transaction:
            journal = Journal(transaction)
            return [
                [_judge(transaction, journal, raw, work, request) for raw, work in request.works]
                for request in requests
            ]

    def proof(self, sequence: int) -> bytes | None:
        """The sealed proof that entry ``sequence`` rests on, as long as it is kept."""
        with self._environment.read() as transaction:
            return read_proof(transaction, sequence)

    def expire(self, now_ms: int) -> bool:
        """Forget a bounded number of what nobody needs any more: tickets that can no longer settle, proofs, evidence.

        Returns:
            whether there was any.
        """
        with self._environment.read() as transaction:
            is_old = has_old_proof(transaction, now_ms) or has_old_evidence(transaction, now_ms)
            is_old = is_old or has_old_days(transaction, now_ms)
            if not is_old and expire(LedgerState(transaction), now_ms) is None:
                return False
        with self._environment.write() as transaction:
            journal = Journal(transaction)
            change = expire(journal.state, now_ms)
            if change is not None:
                journal.write(change, now_ms)
            drop_old_proofs(transaction, now_ms)
            drop_old_evidence(transaction, now_ms)
            drop_old_days(transaction, now_ms)
        return True

    # ---- Verdicts, slashes, the blacklist ----

    def record_verdict(
        self,
        verdict: VerdictReached,
        now_ms: int,
        slashed: Slashed | None = None,
        evidence: AuditEvidence | None = None,
    ) -> Recorded | None:
        """Write down how an audit ended for a peer, with what it costs and what it rests on, in one transaction.

        Args:
            verdict: the first one of this audit on this peer counts.
            now_ms: the time, Unix milliseconds.
            slashed: of the same peer, for the same audit.
            evidence: is kept for `AUDIT_EVIDENCE_S`.

        Returns:
            None where one was written down before: then nothing is done.
        """
        with self._environment.write() as transaction:
            journal = Journal(transaction)
            if journal.state.has_verdict(verdict.audit_id, verdict.peer):
                return None
            sequence = journal.write(verdict, now_ms)
            kept = evidence is not None and keep_evidence(transaction, sequence, evidence, now_ms)
            if slashed is not None:
                journal.write(slashed, now_ms)
        return Recorded(sequence, kept)

    def audit_evidence(self, sequence: int) -> AuditEvidence | None:
        """What the verdict of entry ``sequence`` rests on, as long as it is kept."""
        with self._environment.read() as transaction:
            return read_evidence(transaction, sequence)

    def kept_reports(self, sequences: Iterable[int]) -> dict[int, int]:
        """Of which of these entries evidence is kept, with how many auditors' reports."""
        with self._environment.read() as transaction:
            kept = {sequence: read_evidence(transaction, sequence) for sequence in sequences}
        return {sequence: len(evidence.reports) for sequence, evidence in kept.items() if evidence is not None}

    def begin_audit(self, audit: OpenAudit) -> bool:
        """Keep an audit until `end_audit`; False where `MAX_KEPT_AUDITS` others are kept. Durable when it returns."""
        with self._environment.write() as transaction:
            return keep_open(transaction, audit)

    def end_audit(self, audit_id: bytes) -> None:
        """Forget an audit that is over."""
        with self._environment.write() as transaction:
            drop_open(transaction, audit_id)

    def open_audits(self) -> list[OpenAudit]:
        """The audits that began and did not end: what a restart takes up again."""
        with self._environment.read() as transaction:
            return read_open(transaction)

    def slash(
        self,
        peer: PeerId,
        micro_credits: int,
        reason: str,
        by: Literal["operator", "audit"],
        now_ms: int,
        audit_id: bytes | None = None,
    ) -> bool:
        """Take credits off a peer, which may leave it below 0. Durable when it returns.

        Args:
            peer: whose account.
            micro_credits: how many, not below 0.
            reason: for the journal, up to 512 characters.
            by: who decided so.
            now_ms: the time, Unix milliseconds.
            audit_id: the audit that it is for.

        Returns:
            False where the peer was slashed for this audit before: then nothing is taken.
        """
        change = Slashed(peer=peer, micro_credits=micro_credits, reason=reason, by=by, audit_id=audit_id)
        with self._environment.write() as transaction:
            journal = Journal(transaction)
            if audit_id is not None and journal.state.has_slash(audit_id, peer):
                return False
            journal.write(change, now_ms)
        return True

    def set_blacklisted(self, peer: PeerId, blacklisted: bool, reason: str, now_ms: int) -> bool:
        """Put a peer on the blacklist, or take it off; False where it was so already. Durable when it returns."""
        change = BlacklistChanged(peer=peer, blacklisted=blacklisted, reason=reason)
        with self._environment.write() as transaction:
            journal = Journal(transaction)
            if (journal.state.blacklisted(peer) is not None) == blacklisted:
                return False
            journal.write(change, now_ms)
        return True

    def reputation(self, peer: str, now_ms: int) -> Reputation:
        """How a peer did, its score decayed to ``now_ms``; a clean slate for a stranger."""
        with self._environment.read() as transaction:
            return at_time(LedgerState(transaction).reputation(peer), now_ms)

    def reputations(self, after: str, limit: int, now_ms: int) -> list[tuple[PeerId, Reputation]]:
        """Up to ``limit`` peers that a verdict or a slash concerned, whose ids follow ``after``."""
        with self._environment.read() as transaction:
            page = LedgerState(transaction).reputations(after, limit)
        return [(peer, at_time(reputation, now_ms)) for peer, reputation in page]

    def is_blacklisted(self, peer: str) -> bool:
        """Whether a peer is on the blacklist."""
        with self._environment.read() as transaction:
            return LedgerState(transaction).blacklisted(peer) is not None

    def blacklist(self, after: str = "", limit: int = MAX_PAGE_ROWS) -> list[tuple[PeerId, int, str]]:
        """Up to ``limit`` blacklisted peers whose ids follow ``after``: the peer, since when (Unix milliseconds), why."""
        with self._environment.read() as transaction:
            return LedgerState(transaction).blacklist(after, limit)

    # ---- Accounts and the journal ----

    def account(self, name: str) -> Account:
        """One account."""
        with self._environment.read() as transaction:
            return LedgerState(transaction).accounts.get(name)

    def standing(self, peer: str) -> tuple[Account, bool]:
        """The account of a peer, and whether the peer is on the blacklist."""
        with self._environment.read() as transaction:
            state = LedgerState(transaction)
            return state.accounts.get(peer), state.blacklisted(peer) is not None

    def accounts(self, after: str = "", limit: int = _PAGE) -> list[Account]:
        """Up to ``limit`` accounts whose names follow ``after``."""
        with self._environment.read() as transaction:
            return LedgerState(transaction).accounts.page(after, limit)

    def total(self) -> int:
        """The sum over all accounts: 0."""
        with self._environment.read() as transaction:
            return LedgerState(transaction).accounts.total()

    def journal(self, since: int = 0, limit: int = _PAGE) -> list[tuple[int, JournalEntry]]:
        """Up to ``limit`` entries with their sequences (from 1), after sequence ``since``."""
        with self._environment.read() as transaction:
            return read_entries(transaction, since, limit)

    def newest(self, before: int | None = None, limit: int = MAX_PAGE_ROWS) -> list[tuple[int, JournalEntry]]:
        """Up to ``limit`` entries below sequence ``before``, the newest first."""
        with self._environment.read() as transaction:
            return read_newest(transaction, before, limit)

    def head(self) -> Head:
        """The chain, the sequence of the last entry and its hash; in constant time."""
        with self._environment.read() as transaction:
            return read_head(transaction)

    def snapshot(self, since: int, limit: int = MAX_PAGE_ROWS) -> list[SnapshotRow]:
        """Up to ``limit`` entries after sequence ``since``, and the proofs that they rest on, within `SNAPSHOT_PAGE_BYTES`."""
        with self._environment.read() as transaction:
            return read_snapshot(transaction, since, limit)

    def replay(self) -> DictTables:
        """The state that the journal alone gives; equal to `content`."""
        tables = DictTables()
        state, since = LedgerState(tables), 0
        while page := self.journal(since):
            for _, entry in page:
                state.apply(entry.change, entry.at)
            since = page[-1][0]
        return tables

    def content(self) -> dict[str, list[tuple[bytes, bytes]]]:
        """Every row of the state, by table: for checks against `replay`."""
        with self._environment.read() as transaction:
            tables = {name: transaction.scan(name, b"", transaction.count(name)) for name in TABLE_NAMES}
        return {name: rows for name, rows in tables.items() if rows}

    # ---- What is not accounted for ----

    def keep_model(self, root: bytes, row: bytes | None) -> None:
        """Keep what was published of a model, by its manifest root, in place of what was kept before; None: forget it.

        Raises:
            StorageError: also when `MAX_SERVED_MODELS` others are kept.
        """
        with self._environment.write() as transaction:
            if row is None:
                transaction.delete(_MODELS, root)
                return
            if transaction.get(_MODELS, root) is None and transaction.count(_MODELS) >= MAX_SERVED_MODELS:
                raise StorageError(f"{MAX_SERVED_MODELS} models are kept already")
            transaction.put(_MODELS, root, row)

    def models(self) -> dict[bytes, bytes]:
        """What `keep_model` kept, by manifest root."""
        with self._environment.read() as transaction:
            return dict(transaction.scan(_MODELS, b"", MAX_SERVED_MODELS))

    def serial_floor(self) -> int:
        """Lease serials up to this one may have been used."""
        return self._number(_SERIAL_FLOOR)

    def assignments(self) -> dict[PeerId, Assignment]:
        """What `keep_assignments` kept, at most `MAX_MEMBERS`.

        Raises:
            StorageError: a row is damaged, or of a newer version.
        """
        with self._environment.read() as transaction:
            rows = transaction.scan(_ASSIGNMENTS, b"", MAX_MEMBERS)
        try:
            return {PeerId(key.decode("ascii")): decode_assignment(row) for key, row in rows}
        except (MalformedMessage, UnicodeDecodeError) as error:
            raise StorageError(f"{self._environment.path} holds a damaged assignment: put a backup back") from error

    def keep_assignments(
        self,
        changed: Mapping[PeerId, Assignment | None],
        serial_floor: int = 0,
        revoked: Mapping[PeerId, Revocation | None] = MappingProxyType({}),
    ) -> None:
        """Replace assignments and revocations (None: forget it) and reserve lease serials up to a floor, in one transaction.

        A floor that is lower than the one before changes nothing.
        """
        with self._environment.write() as transaction:
            _raise_number(transaction, _SERIAL_FLOOR, serial_floor)
            for peer, assignment in changed.items():
                if assignment is None:
                    transaction.delete(_ASSIGNMENTS, peer.encode())
                else:
                    transaction.put(_ASSIGNMENTS, peer.encode(), encode_assignment(assignment))
            for peer, revocation in revoked.items():
                if revocation is None:
                    transaction.delete(_REVOCATIONS, peer.encode())
                else:
                    transaction.put(_REVOCATIONS, peer.encode(), encode_revocation(revocation))

    def revocations(self) -> dict[PeerId, Revocation]:
        """What `keep_assignments` kept of leases that were taken away, at most `MAX_REVOCATIONS`.

        Raises:
            StorageError: a row is damaged, or of a newer version.
        """
        with self._environment.read() as transaction:
            rows = transaction.scan(_REVOCATIONS, b"", MAX_REVOCATIONS)
        try:
            return {PeerId(key.decode("ascii")): decode_revocation(row) for key, row in rows}
        except (MalformedMessage, UnicodeDecodeError) as error:
            raise StorageError(f"{self._environment.path} holds a damaged revocation: put a backup back") from error

    def sequence_floor(self) -> int:
        """Envelope sequences up to this one may have been used."""
        return self._number(_SEQUENCE_FLOOR)

    def raise_sequence_floor(self, value: int) -> None:
        """Reserve envelope sequences up to ``value``; a lower value changes nothing."""
        with self._environment.write() as transaction:
            _raise_number(transaction, _SEQUENCE_FLOOR, value)

    def _number(self, name: str) -> int:
        with self._environment.read() as transaction:
            return transaction.number(name) or 0


def _raise_number(transaction: Transaction, name: str, value: int) -> None:
    if value > (transaction.number(name) or 0):
        transaction.set_number(name, value)


def _migrate(transaction: Transaction, found: int) -> None:
    """Take over a ledger of an older schema: its journal says everything."""
    try:
        rewrite_state(transaction, hashed=found >= _HASHED_SCHEMA)
    except (MalformedMessage, LocalProtocolError) as error:
        raise StorageError(f"the journal of a ledger of schema {found} is damaged: put a backup back") from error


def _refused_or_shown(verified: ProvenWork | ProofRefused) -> ProvenWork | Judged:
    if isinstance(verified, ProofRefused):
        return Judged(refusal(verified), verified.peer)
    return verified


def _judge(
    transaction: Transaction, journal: Journal, raw: bytes, work: ProvenWork | Judged, request: _Request
) -> Judged:
    if isinstance(work, Judged):
        return work
    try:
        changes, settled = settle(journal.state, work, request.terms, request.now_ms)
    except ProofRefused as error:
        return Judged(refusal(error), work.worker, None, work)
    now_ms, sequence = request.now_ms, None
    if changes and read_day_bytes(transaction, work.worker, now_ms) >= SETTLED_BYTES_PER_WORKER_DAY:
        return Judged(too_many_bytes(work.worker, changes, settled), work.worker, None, work)
    for change in changes:
        entry = encode_entry(JournalEntry(at=now_ms, change=change))
        sequence = journal.append(entry, change, now_ms, raw)
        add_day_bytes(transaction, work.worker, now_ms, len(raw) + len(entry))
    return Judged(settled, work.worker, sequence, work)
