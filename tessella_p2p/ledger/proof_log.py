"""The worker's write-ahead log: what it can prove is durable before anything is uploaded.

    open session ──put_checkpoint──▶ checkpoint ──put_proof──▶ pending ──settle──▶ settled, duplicate, refused: counted, gone
                                                                  ▲           └──▶ held ──requeue_held──┐
                                                                  └─────────────────────────────────────┘

Each method is durable when it returns. They block (a commit waits for the disk), so the caller decides about threads. Held proofs are
kept apart, so that they do not stand in the way of new ones; the caller calls `requeue_held` at most daily.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tessella_p2p.base.errors import LocalProtocolError
from tessella_p2p.base.limits import MAX_PROOF_BATCH_BYTES, MAX_PROOF_BYTES, PROOF_LOG_MAP_BYTES
from tessella_p2p.ledger.environment import Environment

SCHEMA = 1
_CHECKPOINTS, _PENDING, _HELD = "checkpoints", "pending", "held"
_SEQUENCE_FLOOR = "sequence_floor"
_SESSION_BYTES = 16
_PAGE = 256


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What was proven of a session so far; whether ``proof`` is sealed is the caller's choice."""

    session: bytes
    epoch: int
    proof: bytes


@dataclass(frozen=True, slots=True)
class PendingProof:
    """A sealed proof that waits for its settlement."""

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
            path, (_CHECKPOINTS, _PENDING, _HELD), map_size_bytes=map_size_bytes, schema=SCHEMA, sync=sync
        )

    def close(self) -> None:
        """Close the database."""
        self._environment.close()

    def put_checkpoint(self, session: bytes, epoch: int, proof: bytes) -> None:
        """Replace the checkpoint of an open session; one whose proof is there already keeps that."""
        key = _key(session, epoch, proof)
        with self._environment.write() as transaction:
            if transaction.get(_PENDING, key) is None and transaction.get(_HELD, key) is None:
                transaction.put(_CHECKPOINTS, key, proof)

    def checkpoints(self) -> list[Checkpoint]:
        """The sessions that were open; right after a start: when the process before died."""
        with self._environment.read() as transaction:
            rows = transaction.scan(_CHECKPOINTS, b"", transaction.count(_CHECKPOINTS))
        return [Checkpoint(*_session_epoch(key), row) for key, row in rows]

    def put_proof(self, session: bytes, epoch: int, envelope: bytes) -> None:
        """Keep a session's sealed proof until it is settled; its checkpoint goes in the same transaction."""
        key = _key(session, epoch, envelope)
        with self._environment.write() as transaction:
            transaction.put(_PENDING, key, envelope)
            transaction.delete(_HELD, key)
            transaction.delete(_CHECKPOINTS, key)

    def pending(self, limit: int, max_bytes: int = MAX_PROOF_BATCH_BYTES) -> list[PendingProof]:
        """Up to ``limit`` proofs to upload, of ``max_bytes`` together (the first one in any case)."""
        with self._environment.read() as transaction:
            rows = transaction.scan(_PENDING, b"", limit)
        found: list[PendingProof] = []
        for key, envelope in rows:
            max_bytes -= len(envelope)
            if found and max_bytes < 0:
                break
            found.append(PendingProof(*_session_epoch(key), envelope))
        return found

    def settle(self, session: bytes, epoch: int, status: str, micro_credits: int, code: str | None) -> None:
        """Note the orchestrator's answer; the proof leaves `pending`.

        Args:
            session, epoch: which proof.
            status: of `Settled`: settled, duplicate, held or refused.
            micro_credits: what the proof has brought in all.
            code: why it is held or refused; kept beside a held proof.
        """
        key = _key(session, epoch, b"")
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
            transaction.set_number("micro_credits", (transaction.number("micro_credits") or 0) + micro_credits)

    def requeue_held(self, limit: int = _PAGE) -> int:
        """Make up to ``limit`` held proofs pending again; how many they were. Call it daily, not in a loop with uploads."""
        with self._environment.write() as transaction:
            rows = transaction.scan(_HELD, b"", limit)
            for key, row in rows:
                transaction.put(_PENDING, key, row.partition(b"\0")[2])
                transaction.delete(_HELD, key)
        return len(rows)

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


def _key(session: bytes, epoch: int, proof: bytes) -> bytes:
    if len(session) != _SESSION_BYTES or len(proof) > MAX_PROOF_BYTES:
        raise LocalProtocolError(
            f"a session of {len(session)} bytes with a proof of {len(proof)}; 16 and at most {MAX_PROOF_BYTES} are right"
        )
    return session + epoch.to_bytes(4, "big")


def _session_epoch(key: bytes) -> tuple[bytes, int]:
    return key[:_SESSION_BYTES], int.from_bytes(key[_SESSION_BYTES:], "big")
