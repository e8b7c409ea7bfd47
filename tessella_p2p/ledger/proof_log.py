"""The worker's write-ahead log: what it can prove is durable before anything is uploaded.

    open session ──put_checkpoint──▶ checkpoint ──put_proof──▶ pending ──settle──▶ settled, duplicate, refused: counted, gone
                                                                  ▲           └──▶ held ──requeue_held──┐
                                                                  └─────────────────────────────────────┘

Each method is durable when it returns. They block (a commit waits for the disk), so the caller decides about threads. Held proofs are
kept apart, so that they do not stand in the way of new ones; the caller calls `requeue_held` and `drop_overdue` at most daily. Likewise
the proofs of each orchestrator: a proof settles only where its ticket was minted, and one that cannot be reached holds up no other's.

Keys are the minter's peer id, the session (16 bytes) and the epoch (4 bytes).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tessella_p2p.base.errors import (
    LocalProtocolError,
    MalformedMessage,
    RemoteProtocolError,
    StorageError,
    VersionMismatch,
)
from tessella_p2p.base.ids import PeerId
from tessella_p2p.base.limits import MAX_PROOF_BATCH_BYTES, MAX_PROOF_BYTES, PROOF_LOG_MAP_BYTES
from tessella_p2p.ledger.environment import Environment, Transaction
from tessella_p2p.wire.envelope import open_envelope, peek_audience
from tessella_p2p.wire.messages import PROOF

SCHEMA = 2
"""2 put the minter into the keys."""
_OLDEST_SCHEMA = 1
_CHECKPOINTS, _PENDING, _HELD = "checkpoints", "pending", "held"
_SEQUENCE_FLOOR = "sequence_floor"
_HAS_MINTERS = "has_minters"
_SESSION_BYTES = 16
_WORK_BYTES = _SESSION_BYTES + 4
_AFTER = b"\xff"
"""Behind every key of one minter: peer ids are ASCII."""
_PAGE = 256
_MAX_NUMBER = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What was proven of a session so far; whether ``proof`` is sealed is the caller's choice."""

    minter: PeerId
    session: bytes
    epoch: int
    proof: bytes


@dataclass(frozen=True, slots=True)
class PendingProof:
    """A sealed proof that waits for its settlement by ``minter``."""

    minter: PeerId
    session: bytes
    epoch: int
    envelope: bytes


@dataclass(frozen=True, slots=True)
class ProofCounts:
    """How many sessions have a checkpoint, and how many proofs wait, were settled, are held or were refused.

    ``micro_credits`` is what the orchestrator said that the settled ones brought.
    """

    open: int
    pending: int
    settled: int
    held: int
    refused: int
    micro_credits: int


class ProofLog:
    """One worker's log, in an LMDB folder that no other process may open.

    Raises:
        StorageError: here and in every method, when the folder is in use, full or unwritable; it says what to do.
    """

    def __init__(self, path: Path, map_size_bytes: int = PROOF_LOG_MAP_BYTES, *, sync: bool = True) -> None:
        self._environment = Environment(
            path,
            (_CHECKPOINTS, _PENDING, _HELD),
            map_size_bytes=map_size_bytes,
            schema=SCHEMA,
            since=_OLDEST_SCHEMA,
            sync=sync,
        )
        try:
            with self._environment.write() as transaction:
                if not transaction.number(_HAS_MINTERS):
                    _put_minters_into_keys(transaction, path)
                    transaction.set_number(_HAS_MINTERS, 1)
        except StorageError:
            self._environment.close()
            raise

    def close(self) -> None:
        """Close the database."""
        self._environment.close()

    def put_checkpoint(self, minter: PeerId, session: bytes, epoch: int, proof: bytes) -> None:
        """Replace the checkpoint of an open session; one whose proof is there already keeps that."""
        key = _key(minter, session, epoch, proof)
        with self._environment.write() as transaction:
            if transaction.get(_PENDING, key) is None and transaction.get(_HELD, key) is None:
                transaction.put(_CHECKPOINTS, key, proof)

    def checkpoints(self) -> list[Checkpoint]:
        """The sessions that were open; right after a start: when the process before died."""
        with self._environment.read() as transaction:
            rows = transaction.scan(_CHECKPOINTS, b"", transaction.count(_CHECKPOINTS))
        return [Checkpoint(*_parts(key), row) for key, row in rows]

    def put_proof(self, minter: PeerId, session: bytes, epoch: int, envelope: bytes) -> None:
        """Keep a session's sealed proof until ``minter`` has settled it; its checkpoint goes in the same transaction."""
        key = _key(minter, session, epoch, envelope)
        with self._environment.write() as transaction:
            transaction.put(_PENDING, key, envelope)
            transaction.delete(_HELD, key)
            transaction.delete(_CHECKPOINTS, key)

    def minters(self) -> list[PeerId]:
        """Orchestrators that proofs wait for."""
        found: list[PeerId] = []
        with self._environment.read() as transaction:
            while rows := transaction.scan(_PENDING, found[-1].encode() + _AFTER if found else b"", 1):
                found.append(_parts(rows[0][0])[0])
        return found

    def pending(self, minter: PeerId, limit: int, max_bytes: int = MAX_PROOF_BATCH_BYTES) -> list[PendingProof]:
        """Up to ``limit`` proofs to upload to ``minter``, of ``max_bytes`` together (the first one in any case)."""
        with self._environment.read() as transaction:
            rows = transaction.scan(_PENDING, minter.encode(), limit)
        found: list[PendingProof] = []
        for key, envelope in rows:
            proof = PendingProof(*_parts(key), envelope)
            max_bytes -= len(envelope)
            if proof.minter != minter or (found and max_bytes < 0):
                break
            found.append(proof)
        return found

    def settle(
        self, minter: PeerId, session: bytes, epoch: int, status: str, micro_credits: int, code: str | None
    ) -> None:
        """Note the orchestrator's answer; the proof leaves `pending`.

        Args:
            minter, session, epoch: which proof.
            status: of `Settled`: settled, duplicate, held or refused.
            micro_credits: what the proof has brought in all.
            code: why it is held or refused; kept beside a held proof.
        """
        key = _key(minter, session, epoch, b"")
        with self._environment.write() as transaction:
            envelope = transaction.get(_PENDING, key)
            if envelope is None:
                return
            transaction.delete(_PENDING, key)
            if status == "held":
                transaction.put(_HELD, key, (code or "").encode()[:128] + b"\0" + envelope)
                return
            name = "refused" if status == "refused" else "settled"
            transaction.set_number(name, (transaction.number(name) or 0) + 1)
            brought = (transaction.number("micro_credits") or 0) + micro_credits
            transaction.set_number("micro_credits", min(brought, _MAX_NUMBER))

    def requeue_held(self, limit: int = _PAGE) -> int:
        """Make up to ``limit`` held proofs pending again; how many they were. Call it daily, not in a loop with uploads."""
        with self._environment.write() as transaction:
            rows = transaction.scan(_HELD, b"", limit)
            for key, row in rows:
                transaction.put(_PENDING, key, row.partition(b"\0")[2])
                transaction.delete(_HELD, key)
        return len(rows)

    def drop_overdue(self, now_ms: int) -> int:
        """Drop proofs that have expired and so can settle nowhere any more, where nobody would say so: their minter is gone. They count
        as refused; returns how many they were.
        """
        num = 0
        for table in (_PENDING, _HELD):
            after = b""
            while rows := self._page(table, after):
                overdue = [key for key, row in rows if _expires_at(table, key, row) <= now_ms]
                if overdue:
                    self._drop(table, overdue)
                num += len(overdue)
                after = rows[-1][0] + b"\0"
        return num

    def _drop(self, table: str, keys: Sequence[bytes]) -> None:
        with self._environment.write() as transaction:
            for key in keys:
                transaction.delete(table, key)
            transaction.set_number("refused", (transaction.number("refused") or 0) + len(keys))

    def _page(self, table: str, after: bytes) -> list[tuple[bytes, bytes]]:
        with self._environment.read() as transaction:
            return transaction.scan(table, after, _PAGE)

    def counts(self) -> ProofCounts:
        """How many proofs are in which state."""
        with self._environment.read() as transaction:
            return ProofCounts(
                open=transaction.count(_CHECKPOINTS),
                pending=transaction.count(_PENDING),
                settled=transaction.number("settled") or 0,
                held=transaction.count(_HELD),
                refused=transaction.number("refused") or 0,
                micro_credits=transaction.number("micro_credits") or 0,
            )

    def sequence_floor(self) -> int:
        """Envelope sequences up to this one may have been used."""
        with self._environment.read() as transaction:
            return transaction.number(_SEQUENCE_FLOOR) or 0

    def raise_sequence_floor(self, value: int) -> None:
        """Reserve envelope sequences up to ``value``; a lower value changes nothing."""
        with self._environment.write() as transaction:
            if value > (transaction.number(_SEQUENCE_FLOOR) or 0):
                transaction.set_number(_SEQUENCE_FLOOR, value)


def _key(minter: PeerId, session: bytes, epoch: int, proof: bytes) -> bytes:
    if len(session) != _SESSION_BYTES or len(proof) > MAX_PROOF_BYTES:
        raise LocalProtocolError(
            f"a session of {len(session)} bytes with a proof of {len(proof)}; 16 and at most {MAX_PROOF_BYTES} are right"
        )
    return minter.encode("ascii") + session + epoch.to_bytes(4, "big")


def _expires_at(table: str, key: bytes, row: bytes) -> float:
    """When the sealed proof in a row expires, Unix milliseconds; a row that holds none is kept."""
    raw = row.partition(b"\0")[2] if table == _HELD else row
    try:
        return open_envelope(raw, PROOF, now_ms=None, audience=_parts(key)[0]).expires_at
    except RemoteProtocolError:
        return math.inf


def _parts(key: bytes) -> tuple[PeerId, bytes, int]:
    """Minter, session, epoch."""
    minter, work = key[:-_WORK_BYTES], key[-_WORK_BYTES:]
    return PeerId(minter.decode("ascii")), work[:_SESSION_BYTES], int.from_bytes(work[_SESSION_BYTES:], "big")


def _put_minters_into_keys(transaction: Transaction, path: Path) -> None:
    """Rewrite what version 1 wrote: there the minter stood in the sealed proof alone."""
    for table in (_CHECKPOINTS, _PENDING, _HELD):
        for key, row in transaction.scan(table, b"", transaction.count(table)):
            envelope = row.partition(b"\0")[2] if table == _HELD else row
            try:
                minter = peek_audience(envelope)
            except (MalformedMessage, VersionMismatch) as error:
                raise StorageError(
                    f"{path} holds a damaged proof: put a backup back, or move the folder away"
                ) from error
            transaction.delete(table, key)
            transaction.put(table, minter.encode() + key, row)
