"""The journal's hash chain: each entry names the hash of the one before it, so its head stands for every entry (pure).

    H(0)  = 32 zero bytes
    H(n)  = SHA-256(context ‖ chain ‖ sequence n ‖ H(n−1) ‖ the entry's bytes)

``chain`` rises with each restore from a backup: what was appended after the backup is lost to this ledger but may be known to others,
so a restored ledger speaks of a chain of its own and is never taken for an orchestrator that says two things.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from tessella_p2p.base.errors import LocalProtocolError

HASH_BYTES = 32
START = bytes(HASH_BYTES)
"""What the first entry of a chain names as the hash before it."""

_CONTEXT = b"tessella-journal\0"


@dataclass(frozen=True, slots=True)
class Head:
    """Where a journal ends: the sequence of its last entry (0: it is empty) and that entry's hash."""

    chain: int
    sequence: int
    hash: bytes


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    """One entry as it is shown to others.

    Attributes:
        sequence: from 1, without gaps.
        previous: the hash of the entry before it.
        entry: the journal's bytes, see ``ledger.changes``.
        proof: the sealed proof that a settled entry rests on, as long as it is kept.
    """

    sequence: int
    previous: bytes
    entry: bytes
    proof: bytes | None


def entry_hash(previous: bytes, chain: int, sequence: int, entry: bytes) -> bytes:
    """The 32-byte hash of one entry: what the next one names as ``previous``."""
    place = chain.to_bytes(8, "big") + sequence.to_bytes(8, "big")
    return hashlib.sha256(_CONTEXT + place + previous + entry).digest()


def pack_row(previous: bytes, entry: bytes) -> bytes:
    """What the journal's table holds of an entry."""
    return previous + entry


def unpack_row(row: bytes) -> tuple[bytes, bytes]:
    """``previous`` and the entry's bytes.

    Raises:
        LocalProtocolError: the row is damaged.
    """
    if len(row) <= HASH_BYTES:
        raise LocalProtocolError("a row of the journal is damaged")
    return row[:HASH_BYTES], row[HASH_BYTES:]
