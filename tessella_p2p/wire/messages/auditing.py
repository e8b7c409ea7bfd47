"""Audits: the orchestrator's order, the history that it is carried out on, and the auditor's report.

No message of these to the orchestrator holds a token, a tensor or the key of a digest: what an auditor says of them are keyed digests.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tessella_p2p.base.limits import MAX_CANARIES_NAMED, MAX_OPEN_BYTES
from tessella_p2p.wire.envelope import Message
from tessella_p2p.wire.messages.types import (
    Addresses,
    CanaryMode,
    Count,
    Digest,
    Epoch,
    Layers,
    Name,
    Peer,
    Positions,
    Reason,
    Sealed,
    Session,
    TimeMs,
)

AuditId = Annotated[bytes, Field(min_length=16, max_length=16)]
Comparison = Literal["bitwise", "tolerance"]
"""How outputs are compared: within a drift class by their keyed digest, across classes by the measured tolerance of the pair."""
Outcome = Literal["match", "mismatch", "inconclusive"]


class CanaryNamed(Message):
    """A canary that serves the audited range, and how it answers."""

    peer_id: Peer
    mode: CanaryMode


class AuditOrder(Message):
    """Recompute what a worker proved. Domain `ORDER`, audience the auditor, signer the orchestrator.

    Whoever keeps the history of (session, epoch) shows it to the auditor that this order names. ``proof`` is the audited worker's,
    sealed; ``positions`` how far it is recomputed: one of the proof's marks, or its end. ``tolerance_ppm`` is in millionths of the
    largest magnitude of the true output, where the comparison is by tolerance.
    """

    kind: Literal["audit_order"] = "audit_order"
    audit_id: AuditId
    auditor: Peer
    audited: Peer
    proof: Sealed
    session: Session
    epoch: Epoch
    layers: Layers
    recipe: Name
    positions: Positions
    upstream: Peer
    upstream_addresses: Addresses
    downstream: Peer
    downstream_addresses: Addresses
    comparison: Comparison
    tolerance_ppm: Count = 0
    canaries: Annotated[tuple[CanaryNamed, ...], Field(max_length=MAX_CANARIES_NAMED)] = ()
    report_before: TimeMs


class AuditReport(Message):
    """What an auditor saw; the signer is the auditor. Manual: ``/api/v1/audit_report``.

    ``input_digest`` is that of the history that it was shown, ``output_digest`` that of its own recomputation, both keyed and up to the
    order's ``positions``; ``error_ppm`` the largest deviation that it measured. ``copied`` names the canary whose known-wrong answer
    the proof's output is, bit for bit; ``code`` why nothing could be said.
    """

    kind: Literal["audit_report"] = "audit_report"
    audit_id: AuditId
    outcome: Outcome
    input_digest: Digest | None = None
    output_digest: Digest | None = None
    error_ppm: Count | None = None
    copied: Peer | None = None
    withheld_by: Peer | None = None
    code: Name | None = None
    reason: Reason | None = None


class HistoryRequest(Message):
    """An auditor asks a neighbour of the audited stage for what it kept. Domain `HISTORY_REQUEST`, audience the neighbour.

    ``side`` is ``input`` for what it sent to the audited stage, ``output`` for what it received of it.
    """

    order: Sealed
    side: Literal["input", "output"]


class HistoryHead(Message):
    """What a neighbour kept. Domain `HISTORY`, audience the auditor; the rows follow it on the stream, as hop frames.

    ``open`` is the chain-open, which the requester signed: it has the digest key and how the tail drew. ``positions`` is how far the
    rows go; for token ids ``dtype`` is ``u32`` and ``row_bytes`` 4.
    """

    open: Annotated[bytes, Field(min_length=1, max_length=MAX_OPEN_BYTES)]
    session: Session
    epoch: Epoch
    side: Literal["input", "output"]
    dtype: Name
    row_bytes: Count
    positions: Positions


class OrderRefused(Message):
    """A worker does not take an order; ``code`` as in ``base.errors``."""

    kind: Literal["order_refused"] = "order_refused"
    code: Name
    reason: Reason


class OrderTaken(Message):
    """A worker takes an order."""

    kind: Literal["order_taken"] = "order_taken"


class OrderAnswer(Message):
    """The payload of an answer to an order (domain `ORDER_ANSWER`, audience the orchestrator); ``to`` is the order's sequence."""

    to: Count
    body: Annotated[OrderTaken | OrderRefused, Field(discriminator="kind")]
