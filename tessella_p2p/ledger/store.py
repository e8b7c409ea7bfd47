"""The ledger on disk: an append-only journal and the state that follows from it, in one LMDB folder.

A change, its effect on the state and nothing else are one transaction, durable before its answer is given: a process that dies at any
point leaves the journal and the state of the same moment. So opening takes constant time, and `replay` only proves what is there.

Beside the ledger it keeps what else an orchestrator may not forget: its workers' assignments, and the floors of serials and sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tessella_p2p.base.errors import MalformedMessage, StorageError
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import LEDGER_MAP_BYTES, MAX_MEMBERS
from tessella_p2p.ledger.accounts import Account
from tessella_p2p.ledger.assignments import Assignment, decode_assignment, encode_assignment
from tessella_p2p.ledger.changes import JournalEntry, decode_entry, encode_entry
from tessella_p2p.ledger.environment import Environment, Transaction
from tessella_p2p.ledger.evidence import ProofRefused, ProvenWork, SettlementTerms, verify_proof
from tessella_p2p.ledger.settlement import expire, refusal, settle
from tessella_p2p.ledger.state import TABLE_NAMES, LedgerState
from tessella_p2p.ledger.tables import DictTables
from tessella_p2p.wire.messages import Settled

SCHEMA = 2
"""2 added the assignments."""
_OLDEST_SCHEMA = 1
_JOURNAL = "journal"
_ASSIGNMENTS = "assignments"
_SERIAL_FLOOR = "lease_serial_floor"
_SEQUENCE_FLOOR = "sequence_floor"
_PAGE = 1024


@dataclass(frozen=True, slots=True)
class Judged:
    """The answer for one proof, and who signed it where that is known."""

    settled: Settled
    worker: PeerId | None


class LedgerStore:
    """The one writer of a ledger. Methods block; each may be called from any thread.

    Args:
        path: the folder; see `Environment`.
        map_size_bytes: the size to which the file may grow.
        sync: see `Environment`.

    Raises:
        StorageError: here and in every method, when the folder is in use, full or unwritable.
    """

    def __init__(self, path: Path, map_size_bytes: int = LEDGER_MAP_BYTES, *, sync: bool = True) -> None:
        self._environment = Environment(
            path,
            (_JOURNAL, _ASSIGNMENTS, *TABLE_NAMES),
            map_size_bytes=map_size_bytes,
            schema=SCHEMA,
            since=_OLDEST_SCHEMA,
            sync=sync,
        )

    def close(self) -> None:
        """Close the database."""
        self._environment.close()

    def settle(self, proofs: Sequence[bytes], terms: SettlementTerms, now_ms: int) -> list[Judged]:
        """Judge sealed proofs, in order, in one transaction; durable when it returns."""
        verified = [_verify(raw, terms, now_ms) for raw in proofs]
        if not any(isinstance(work, ProvenWork) for work in verified):
            return [work for work in verified if isinstance(work, Judged)]
        with self._environment.write() as transaction:
            journal = _Journal(transaction)
            return [work if isinstance(work, Judged) else _judge(journal, work, terms, now_ms) for work in verified]

    def expire(self, now_ms: int) -> bool:
        """Forget a bounded number of tickets that can no longer settle; whether there was one."""
        with self._environment.read() as transaction:
            if expire(LedgerState(transaction), now_ms) is None:
                return False
        with self._environment.write() as transaction:
            journal = _Journal(transaction)
            change = expire(journal.state, now_ms)
            if change is not None:
                journal.write(JournalEntry(at=now_ms, change=change))
        return True

    def account(self, name: str) -> Account:
        """One account."""
        with self._environment.read() as transaction:
            return LedgerState(transaction).accounts.get(name)

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
            rows = transaction.scan(_JOURNAL, (since + 1).to_bytes(8, "big"), limit)
        return [(int.from_bytes(key, "big"), decode_entry(row)) for key, row in rows]

    def replay(self) -> DictTables:
        """The state that the journal alone gives; equal to `content`."""
        tables = DictTables()
        state, since = LedgerState(tables), 0
        while page := self.journal(since):
            for _, entry in page:
                state.apply(entry.change)
            since = page[-1][0]
        return tables

    def content(self) -> dict[str, list[tuple[bytes, bytes]]]:
        """Every row of the state, by table: for checks against `replay`."""
        with self._environment.read() as transaction:
            tables = {name: transaction.scan(name, b"", transaction.count(name)) for name in TABLE_NAMES}
        return {name: rows for name, rows in tables.items() if rows}

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

    def keep_assignments(self, changed: Mapping[PeerId, Assignment | None], serial_floor: int = 0) -> None:
        """Replace the assignments of some peers (None: forget it) and reserve lease serials up to a floor, in one transaction.

        A floor that is lower than the one before changes nothing.
        """
        with self._environment.write() as transaction:
            _raise_number(transaction, _SERIAL_FLOOR, serial_floor)
            for peer, assignment in changed.items():
                if assignment is None:
                    transaction.delete(_ASSIGNMENTS, peer.encode())
                else:
                    transaction.put(_ASSIGNMENTS, peer.encode(), encode_assignment(assignment))

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


class _Journal:
    """Appends entries and applies their changes within one transaction."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self.state = LedgerState(transaction)
        last = transaction.last_key(_JOURNAL)
        self._sequence = 0 if last is None else int.from_bytes(last, "big")

    def write(self, entry: JournalEntry) -> None:
        self._sequence += 1
        self._transaction.append(_JOURNAL, self._sequence.to_bytes(8, "big"), encode_entry(entry))
        self.state.apply(entry.change)


def _verify(raw: bytes, terms: SettlementTerms, now_ms: int) -> ProvenWork | Judged:
    try:
        return verify_proof(raw, terms, now_ms)
    except ProofRefused as error:
        return Judged(refusal(error), error.peer)


def _judge(journal: _Journal, work: ProvenWork, terms: SettlementTerms, now_ms: int) -> Judged:
    try:
        changes, settled = settle(journal.state, work, terms, now_ms)
    except ProofRefused as error:
        return Judged(refusal(error), work.worker)
    for change in changes:
        journal.write(JournalEntry(at=now_ms, change=change))
    return Judged(settled, work.worker)
