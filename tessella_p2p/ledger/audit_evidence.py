"""What audits rest on, kept beside the journal: not accounted for, bounded, and in every backup.

    table           key                 value
    audit_evidence  sequence (8 bytes)  until when it is kept, the sealed proof that was audited, and the auditors' sealed reports
    open_audits     audit id            why the proof is audited, and the sealed proof

The first is what a verdict that is not ``passed`` can be checked by: the worker signed what it claims, and each auditor what it found.
The second is what a restart would forget.
"""

from __future__ import annotations

from dataclasses import dataclass

from tessella_p2p.base.errors import LocalProtocolError
from tessella_p2p.base.limits import AUDIT_EVIDENCE_S, MAX_AUDIT_EVIDENCE, MAX_DROPPED_PROOFS, MAX_KEPT_AUDITS
from tessella_p2p.ledger.environment import Transaction
from tessella_p2p.ledger.tables import decode_row, encode_row

_EVIDENCE = "audit_evidence"
_OPEN = "open_audits"
AUDIT_TABLES = (_EVIDENCE, _OPEN)
_KEPT_MS = round(AUDIT_EVIDENCE_S * 1000)


@dataclass(frozen=True, slots=True)
class AuditEvidence:
    """What a verdict rests on.

    Attributes:
        proof: the worker's, sealed.
        reports: the auditors', sealed, in the order in which they were asked.
    """

    proof: bytes
    reports: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class OpenAudit:
    """An audit that is under way. ``cause`` is an `audits.sampling.Cause`."""

    audit_id: bytes
    cause: str
    proof: bytes


def keep_evidence(transaction: Transaction, sequence: int, evidence: AuditEvidence, now_ms: int) -> bool:
    """Keep what entry ``sequence``, the newest verdict, rests on; False where `MAX_AUDIT_EVIDENCE` others are kept."""
    if transaction.count(_EVIDENCE) >= MAX_AUDIT_EVIDENCE:
        return False
    row = encode_row([now_ms + _KEPT_MS, evidence.proof, list(evidence.reports)])
    transaction.put(_EVIDENCE, _key(sequence), row)
    return True


def read_evidence(transaction: Transaction, sequence: int) -> AuditEvidence | None:
    """What entry ``sequence`` rests on; None where it is no such verdict, or nothing is kept of it."""
    row = transaction.get(_EVIDENCE, _key(sequence))
    return None if row is None else _decoded(row)[1]


def has_old_evidence(transaction: Transaction, now_ms: int) -> bool:
    """Whether the time of the oldest evidence is over."""
    rows = transaction.scan(_EVIDENCE, b"", 1)
    return bool(rows) and _decoded(rows[0][1])[0] <= now_ms


def drop_old_evidence(transaction: Transaction, now_ms: int) -> None:
    """Drop a bounded number of rows whose time is over, the oldest first."""
    for key, row in transaction.scan(_EVIDENCE, b"", MAX_DROPPED_PROOFS):
        if _decoded(row)[0] > now_ms:
            break
        transaction.delete(_EVIDENCE, key)


def keep_open(transaction: Transaction, audit: OpenAudit) -> bool:
    """Keep an audit that begins; False where `MAX_KEPT_AUDITS` others are kept."""
    if transaction.count(_OPEN) >= MAX_KEPT_AUDITS:
        return False
    transaction.put(_OPEN, audit.audit_id, encode_row([audit.cause, audit.proof]))
    return True


def drop_open(transaction: Transaction, audit_id: bytes) -> None:
    """Forget an audit that is over."""
    transaction.delete(_OPEN, audit_id)


def read_open(transaction: Transaction) -> list[OpenAudit]:
    """The audits that began and are not over."""
    found = []
    for key, row in transaction.scan(_OPEN, b"", MAX_KEPT_AUDITS):
        match decode_row(row):
            case [str(cause), bytes(proof)]:
                found.append(OpenAudit(key, cause, proof))
            case _:
                raise LocalProtocolError("a row of the open audits is damaged")
    return found


def _decoded(row: bytes) -> tuple[int, AuditEvidence]:
    match decode_row(row):
        case [int(until), bytes(proof), [*rows]]:
            reports = tuple(report for report in rows if isinstance(report, bytes))
            return until, AuditEvidence(proof, reports)
    raise LocalProtocolError("a row of the audits' evidence is damaged")


def _key(sequence: int) -> bytes:
    return sequence.to_bytes(8, "big")
