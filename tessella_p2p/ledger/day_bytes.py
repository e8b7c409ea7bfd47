"""How much each worker's settled proofs made the ledger grow in a day, so that no identity fills the disk.

    table      key                          value
    day_bytes  day (8 bytes, UTC), worker   bytes of the day's settled proofs and of their entries (8 bytes)

It is kept beside the journal, in the same transaction as what it counts: no balance follows from it, and a replay needs none of it.
"""

from __future__ import annotations

from typing import Final

from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import MAX_DROPPED_PROOFS
from tessella_p2p.ledger.environment import Transaction
from tessella_p2p.ledger.state import DAY_MS

DAY_BYTES: Final = "day_bytes"


def read_day_bytes(transaction: Transaction, worker: PeerId, now_ms: int) -> int:
    """Bytes that ``worker`` added on the day of ``now_ms`` (Unix milliseconds)."""
    row = transaction.get(DAY_BYTES, _key(now_ms, worker))
    return 0 if row is None else int.from_bytes(row, "big")


def add_day_bytes(transaction: Transaction, worker: PeerId, now_ms: int, num_bytes: int) -> None:
    """Count ``num_bytes`` more."""
    total = read_day_bytes(transaction, worker, now_ms) + num_bytes
    transaction.put(DAY_BYTES, _key(now_ms, worker), total.to_bytes(8, "big"))


def has_old_days(transaction: Transaction, now_ms: int) -> bool:
    """Whether there is a row of a day before yesterday; a clock may be set back over midnight."""
    rows = transaction.scan(DAY_BYTES, b"", 1)
    return bool(rows) and _is_old(rows[0][0], now_ms)


def drop_old_days(transaction: Transaction, now_ms: int) -> None:
    """Drop a bounded number of such rows, the oldest first."""
    for key, _ in transaction.scan(DAY_BYTES, b"", MAX_DROPPED_PROOFS):
        if not _is_old(key, now_ms):
            break
        transaction.delete(DAY_BYTES, key)


def _is_old(key: bytes, now_ms: int) -> bool:
    return int.from_bytes(key[:8], "big") < now_ms // DAY_MS - 1


def _key(now_ms: int, worker: PeerId) -> bytes:
    return (now_ms // DAY_MS).to_bytes(8, "big") + worker.encode()
