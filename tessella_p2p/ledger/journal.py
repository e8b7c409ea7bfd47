"""The journal in one transaction: its hash chain, what it is read by, and the one way to append to it.

    table      key                 value
    journal    sequence (8 bytes)  the hash of the entry before, then the entry (see ``chain``)
    proofs_of  sequence (8 bytes)  the sealed proof that a settled entry rests on, until nobody may need it

What the proofs are kept for is federation: whoever pulls an entry verifies its proof again.
"""

from __future__ import annotations

from tessella_p2p.base.errors import StorageError
from tessella_p2p.base.limits import (
    MAX_DROPPED_PROOFS,
    PROOF_GRACE_S,
    SNAPSHOT_PAGE_BYTES,
    SNAPSHOT_ROW_BYTES,
    TICKET_OPEN_S,
    TICKET_SETTLE_S,
)
from tessella_p2p.ledger.chain import START, Head, SnapshotRow, entry_hash, pack_row, unpack_row
from tessella_p2p.ledger.changes import ChainBegun, Change, JournalEntry, encode_entry, read_entry
from tessella_p2p.ledger.environment import Transaction
from tessella_p2p.ledger.state import TABLE_NAMES as STATE_TABLES
from tessella_p2p.ledger.state import LedgerState

JOURNAL = "journal"
PROOFS_OF = "proofs_of"
JOURNAL_TABLES = (JOURNAL, PROOFS_OF)

_CHAIN = "chain"
_PAGE = 1024
_KEPT_MS = round((TICKET_OPEN_S + TICKET_SETTLE_S + PROOF_GRACE_S) * 1000)
"""A ticket settles at most so long after it was minted, and no proof of it is older than it."""


class Journal:
    """Reads and appends within one transaction; what is appended is applied to the state in the same one."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self.state = LedgerState(transaction)
        self.head = read_head(transaction)

    def write(self, change: Change, at_ms: int, proof: bytes | None = None) -> int:
        """Append a change and apply it; its sequence.

        Args:
            change: one that was decided on this state.
            at_ms: the time, Unix milliseconds.
            proof: the sealed proof that it rests on.

        Raises:
            LocalProtocolError: it does not fit the state.
        """
        return self.append(encode_entry(JournalEntry(at=at_ms, change=change)), change, at_ms, proof)

    def append(self, entry: bytes, change: Change, at_ms: int, proof: bytes | None) -> int:
        """`write` for an entry whose bytes are there already."""
        chain, sequence = self.head.chain, self.head.sequence + 1
        key = _key(sequence)
        self._transaction.append(JOURNAL, key, pack_row(self.head.hash, entry))
        if proof is not None:
            self._transaction.append(PROOFS_OF, key, proof)
        self.state.apply(change, at_ms)
        self.head = Head(chain, sequence, entry_hash(self.head.hash, chain, sequence, entry))
        return sequence


def read_head(transaction: Transaction) -> Head:
    """Where the journal ends, in constant time."""
    chain = transaction.number(_CHAIN) or 0
    rows = transaction.scan_back(JOURNAL, b"", 1)
    if not rows:
        return Head(chain, 0, START)
    sequence = int.from_bytes(rows[0][0], "big")
    previous, entry = unpack_row(rows[0][1])
    return Head(chain, sequence, entry_hash(previous, chain, sequence, entry))


def rewrite_state(transaction: Transaction, *, hashed: bool) -> None:
    """Build the hash chain and the state anew from the journal's entries alone.

    Args:
        transaction: the one in which all of it happens.
        hashed: whether the rows begin with a hash; those of schemas 1 and 2 do not.

    Raises:
        MalformedMessage, LocalProtocolError: the journal is damaged.
    """
    for table in STATE_TABLES:
        transaction.clear(table)
    state, chain, previous, since = LedgerState(transaction), transaction.number(_CHAIN) or 0, START, 0
    while rows := transaction.scan(JOURNAL, _key(since + 1), _PAGE):
        for key, row in rows:
            entry = unpack_row(row)[1] if hashed else row
            since = int.from_bytes(key, "big")
            transaction.put(JOURNAL, key, pack_row(previous, entry))
            previous = entry_hash(previous, chain, since, entry)
            decoded = read_entry(entry)
            state.apply(decoded.change, decoded.at)


def begin_chain(transaction: Transaction, at_ms: int) -> Head:
    """Check every entry's place in its chain, and give all of them one in the next chain, which begins where this one ends.

    A chain's number is the time of its restore, so that one backup that is put back twice makes two chains: under one number the two
    would contradict each other, and convict an honest orchestrator.

    Raises:
        StorageError: an entry is not the one that was written.
    """
    old = read_head(transaction)
    chain, previous, expected, since = max(old.chain + 1, at_ms), START, START, 0
    while rows := transaction.scan(JOURNAL, _key(since + 1), _PAGE):
        for key, row in rows:
            named, entry = unpack_row(row)
            since += 1
            if named != expected or key != _key(since):
                raise StorageError(f"entry {since} of the journal is damaged: use another backup")
            expected = entry_hash(expected, old.chain, since, entry)
            transaction.put(JOURNAL, key, pack_row(previous, entry))
            previous = entry_hash(previous, chain, since, entry)
    transaction.set_number(_CHAIN, chain)
    journal = Journal(transaction)
    journal.write(ChainBegun(chain=chain, after=old.sequence, after_hash=old.hash), at_ms)
    return journal.head


def read_entries(transaction: Transaction, since: int, limit: int) -> list[tuple[int, JournalEntry]]:
    """Up to ``limit`` entries with their sequences, after sequence ``since``."""
    rows = transaction.scan(JOURNAL, _key(since + 1), limit)
    return [(int.from_bytes(key, "big"), read_entry(unpack_row(row)[1])) for key, row in rows]


def read_newest(transaction: Transaction, before: int | None, limit: int) -> list[tuple[int, JournalEntry]]:
    """Up to ``limit`` entries below sequence ``before``, the newest first."""
    rows = transaction.scan_back(JOURNAL, b"" if before is None else _key(before), limit)
    return [(int.from_bytes(key, "big"), read_entry(unpack_row(row)[1])) for key, row in rows]


def read_snapshot(transaction: Transaction, since: int, limit: int) -> list[SnapshotRow]:
    """Up to ``limit`` entries after sequence ``since``, with what they rest on, that fit into one page; at least one of them."""
    page: list[SnapshotRow] = []
    size_bytes = 0
    for key, row in transaction.walk(JOURNAL, _key(since + 1), limit):
        previous, entry = unpack_row(row)
        proof = transaction.get(PROOFS_OF, key)
        size_bytes += len(entry) + len(proof or b"") + SNAPSHOT_ROW_BYTES
        if page and size_bytes > SNAPSHOT_PAGE_BYTES:
            break
        page.append(SnapshotRow(int.from_bytes(key, "big"), previous, entry, proof))
    return page


def read_proof(transaction: Transaction, sequence: int) -> bytes | None:
    """The sealed proof that entry ``sequence`` rests on, as long as it is kept."""
    return transaction.get(PROOFS_OF, _key(sequence))


def has_old_proof(transaction: Transaction, now_ms: int) -> bool:
    """Whether the oldest proof that is kept is one that nobody needs any more."""
    rows = transaction.scan(PROOFS_OF, b"", 1)
    return bool(rows) and _written_at(transaction, rows[0][0]) + _KEPT_MS <= now_ms


def drop_old_proofs(transaction: Transaction, now_ms: int) -> None:
    """Drop a bounded number of proofs that nobody needs any more, the oldest first."""
    for key, _ in transaction.scan(PROOFS_OF, b"", MAX_DROPPED_PROOFS):
        if _written_at(transaction, key) + _KEPT_MS > now_ms:
            break
        transaction.delete(PROOFS_OF, key)


def _written_at(transaction: Transaction, key: bytes) -> int:
    row = transaction.get(JOURNAL, key)
    return 0 if row is None else read_entry(unpack_row(row)[1]).at


def _key(sequence: int) -> bytes:
    return sequence.to_bytes(8, "big")
