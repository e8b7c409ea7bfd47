"""What the ledger's journal holds: one change after another, from which the whole state follows.

Changes are messages: canonical CBOR, every field bounded, unknown fields refused. So a journal of a newer version is refused by
name instead of being read wrongly.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationError

from tessella_p2p.base.errors import LocalProtocolError, MalformedMessage
from tessella_p2p.ledger.reputation import Verdict
from tessella_p2p.ledger.tables import decode_row
from tessella_p2p.wire.envelope import Message, decode_message, encode_message
from tessella_p2p.wire.messages import (
    AuditId,
    Count,
    Digest,
    DigestMark,
    Epoch,
    Layers,
    Name,
    Peer,
    Positions,
    Reason,
    RequestName,
    Session,
    TimeMs,
)


class ProofSettled(Message):
    """A proof was accepted and, where something was due, paid.

    ``paid_positions`` is up to which position each layer counts as paid afterwards; ``micro_credits`` what this change pays;
    ``complete`` whether everything that was due is paid; ``points`` the digests that neighbours are compared with.
    """

    kind: Literal["proof_settled"] = "proof_settled"
    requester: Peer
    request_id: RequestName
    settle_before: TimeMs
    worker: Peer
    session: Session
    epoch: Epoch
    layers: Layers
    paid_positions: Positions
    micro_credits: Count
    complete: bool
    day: Count
    payload_digest: Digest
    upstream: Peer
    downstream: Peer
    route: Digest | None = None
    """SHA-256 of what the requester stated of the route; None in ledgers from before it did."""
    points: tuple[DigestMark, ...]
    requester_pays: bool = False
    """Whether the amount came off the account of ``payer`` and not out of `issuance`."""
    identity: Peer | None = None
    """In whose name the requester asked, where that is somebody else."""

    @property
    def payer(self) -> str:
        """Whose account the ticket is on: it pays, or its issuance of the day is counted."""
        return self.identity or self.requester


class TicketsExpired(Message):
    """Facts of tickets that can no longer settle at ``before`` (Unix milliseconds) are dropped, oldest first, a bounded number."""

    kind: Literal["tickets_expired"] = "tickets_expired"
    before: TimeMs


class Slashed(Message):
    """Credits were taken off a peer, whose account may be below 0 afterwards, and went back to `issuance`."""

    kind: Literal["slashed"] = "slashed"
    peer: Peer
    micro_credits: Count
    reason: Reason
    by: Literal["operator", "audit"]
    audit_id: AuditId | None = None


class VerdictReached(Message):
    """An audit of ``peer`` came to an end.

    A worker of the same recipe as ``auditor`` recomputed; ``adjudicator`` is the third one that was asked where those two differed.
    With ``requester``, ``request_id``, ``session`` and ``epoch`` it names the audited proof: once that has passed, a neighbour that
    says otherwise no longer holds it.
    """

    kind: Literal["verdict_reached"] = "verdict_reached"
    audit_id: AuditId
    peer: Peer
    verdict: Verdict
    auditor: Peer | None = None
    adjudicator: Peer | None = None
    code: Name | None = None
    reason: Reason = ""
    requester: Peer | None = None
    request_id: RequestName | None = None
    session: Session | None = None
    epoch: Epoch | None = None


class BlacklistChanged(Message):
    """A peer was put on the blacklist, or taken off it."""

    kind: Literal["blacklist_changed"] = "blacklist_changed"
    peer: Peer
    blacklisted: bool
    reason: Reason


class ChainBegun(Message):
    """The ledger was restored from a backup that ended with entry ``after``, whose hash in its own chain was ``after_hash``."""

    kind: Literal["chain_begun"] = "chain_begun"
    chain: Count
    after: Count
    after_hash: Digest


Change = ProofSettled | TicketsExpired | Slashed | VerdictReached | BlacklistChanged | ChainBegun


class JournalEntry(Message):
    """One entry of the journal; its sequence is its key, ``at`` when it was written."""

    at: TimeMs
    change: Annotated[Change, Field(discriminator="kind")]


def encode_entry(entry: JournalEntry) -> bytes:
    """The bytes of an entry."""
    return encode_message(entry)


def decode_entry(data: bytes) -> JournalEntry:
    """The entry in ``data``.

    Raises:
        MalformedMessage: damaged, or written by a newer version.
    """
    return decode_message(JournalEntry, data)


def read_entry(data: bytes) -> JournalEntry:
    """The entry in ``data``, which this program wrote and keeps: without the checks of form that a peer's bytes get.

    Raises:
        MalformedMessage: damaged, or written by a newer version.
    """
    try:
        return JournalEntry.model_validate(decode_row(data), strict=False)  # its lists are to become tuples
    except (ValidationError, LocalProtocolError) as error:
        raise MalformedMessage(f"an entry of the journal is damaged: {type(error).__name__}") from error
