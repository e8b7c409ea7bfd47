"""Audits: the orchestrator's order, the history that it is carried out on, and the auditor's report.

No message of these to the orchestrator holds a token, a tensor or the key of a digest: what an auditor says of them are keyed digests.

An order to recompute bit for bit does not say what the audited worker claims to have answered, only what it claims to have received:
so an auditor that does not compute has nothing to say, and one that says the claimed digest has computed it. The orchestrator compares.
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
Outcome = Literal["computed", "contradicted", "inconclusive"]


class CanaryNamed(Message):
    """A canary that serves the audited range, and how it answers."""

    peer_id: Peer
    mode: CanaryMode


class AuditOrder(Message):
    """Recompute what a worker proved. Domain `ORDER`, audience the auditor, signer the orchestrator.

    Whoever keeps the history of (session, epoch) shows it to the auditor that this order names. ``positions`` is how far it is
    recomputed: one of the proof's marks, or its end; ``input_digest`` what the worker proved to have received up to there. It
    covers the chain-open too, so there is one request only that an auditor can be shown.

    Only where the comparison is by tolerance does the auditor need the worker's own output, from the downstream peer;
    ``output_digest`` is what that has to match, and ``tolerance_ppm`` how far it may be off, in millionths of the largest magnitude
    of the true output.
    """

    kind: Literal["audit_order"] = "audit_order"
    audit_id: AuditId
    auditor: Peer
    audited: Peer
    session: Session
    epoch: Epoch
    manifest_root: Digest
    recipe: Name
    layers: Layers
    positions: Positions
    input_digest: Digest
    upstream: Peer
    upstream_addresses: Addresses
    downstream: Peer
    downstream_addresses: Addresses
    comparison: Comparison
    output_digest: Digest | None = None
    tolerance_ppm: Count = 0
    canaries: Annotated[tuple[CanaryNamed, ...], Field(max_length=MAX_CANARIES_NAMED)] = ()
    report_before: TimeMs


class CanaryDigest(Message):
    """The keyed digest of what a canary would have answered to the audited input, up to the order's positions."""

    peer_id: Peer
    digest: Digest


class AuditReport(Message):
    """What an auditor saw; the signer is the auditor. Manual: ``/api/v1/audit_report``.

    ``computed``: the history had the order's ``input_digest``, and ``output_digest`` is the keyed digest of the auditor's own
    recomputation up to the order's positions; ``canary_digests`` of what the order's ``scale`` canaries would have answered. By
    tolerance ``error_ppm`` is the largest deviation that it measured, in millionths of the largest magnitude of its own output.

    ``contradicted``: the upstream peer showed another history than the one of ``input_digest``, and ``receipt``, which the audited
    worker signed, covers that history. It holds a keyed digest; where the proof states one of the same position, the two signatures
    of the worker contradict each other, whoever brings them.

    ``inconclusive``: ``code`` says why, and ``withheld_by`` who of the order's upstream and downstream did not show what it has to.
    """

    kind: Literal["audit_report"] = "audit_report"
    audit_id: AuditId
    outcome: Outcome
    output_digest: Digest | None = None
    error_ppm: Count | None = None
    canary_digests: Annotated[tuple[CanaryDigest, ...], Field(max_length=MAX_CANARIES_NAMED)] = ()
    receipt: Sealed | None = None
    withheld_by: Peer | None = None
    code: Name | None = None
    reason: Reason | None = None


HistorySide = Literal["input", "output"]
"""Of the audited stage."""


class HistoryRequest(Message):
    """An auditor asks a neighbour of the audited stage for what it kept. Domain `HISTORY_REQUEST`, audience the neighbour.

    ``side`` is ``input`` for what it sent to the audited stage, ``output`` for what it received of it. ``beyond`` the order's
    positions the rows are shown that the audited stage's newest receipt covers: where the beginning is not what it proved to have
    received.
    """

    order: Sealed
    side: HistorySide
    beyond: bool = False


class HistoryHead(Message):
    """What a neighbour kept; the rows follow it on the stream, as hop frames without a trace.

    ``open`` is the chain-open, which the requester signed: it has the digest key and how the tail drew. ``positions`` is how far the
    rows go, at most the order's, or the receipt's. ``receipt`` is the newest that the audited stage signed for what it was sent.
    """

    kind: Literal["history_head"] = "history_head"
    open: Annotated[bytes, Field(min_length=1, max_length=MAX_OPEN_BYTES)]
    session: Session
    epoch: Epoch
    side: HistorySide
    positions: Positions
    receipt: Sealed | None = None


class HistoryRefused(Message):
    """A neighbour shows nothing; ``code`` as in ``base.errors``."""

    kind: Literal["history_refused"] = "history_refused"
    code: Name
    reason: Reason


class HistoryAnswer(Message):
    """The payload of an answer to a `HistoryRequest`. Domain `HISTORY`, audience the auditor; ``to`` is the request's sequence."""

    to: Count
    body: Annotated[HistoryHead | HistoryRefused, Field(discriminator="kind")]


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
